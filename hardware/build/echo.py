"""A bundle that needs no checkpoint: its model gives back what it is given, for the engines `echo` and `synthetic`.

Needs what a node needs, nothing of the builder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.bundle import BundleSpec, GoldenSpec, ModelConfig, Variant, write_spec
from common.errors import BuildError
from common.tensorfile import write_tensors
from common.tensors import BYTES, DATATYPES, Array, TensorSpec, dtype_of

VARIANT = "full"
_GOLDEN = "golden.safetensors"
_NO_GOLDEN = (BYTES, "BF16")
_ROWS = 2
_ROUNDING = 1e-6  # of the metric itself


def write_echo(
    folder: Path, *, name: str = "echo", datatype: str = "FP32", row: Sequence[int] = (16,), max_batch: int = 64
) -> Path:
    """Writes a bundle whose output `y` is its input `x`, of `row`'s shape behind the batch. Raises `BuildError`."""
    shape = (-1, *row)
    try:
        inputs = TensorSpec(name="x", datatype=datatype, shape=shape)
        outputs = TensorSpec(name="y", datatype=datatype, shape=shape)
        model = ModelConfig(name=name, task="tensor", inputs=(inputs,), outputs=(outputs,), max_batch=max_batch)
    except ValueError as exc:
        raise BuildError(f"echo {name!r}: {exc}") from exc
    if datatype in _NO_GOLDEN:
        accepted = ", ".join(one for one in DATATYPES if one not in _NO_GOLDEN)
        raise BuildError(f"echo {name!r}: no golden set can be written in {datatype}; accepted: {accepted}")
    rows = _golden(datatype, (min(_ROWS, max_batch), *(1 if size == -1 else size for size in row)))
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / _GOLDEN, {"input.x": rows, "output.y": rows})
    spec = BundleSpec(
        model=model,
        variants=(Variant(name=VARIANT, files={"echo": (), "synthetic": ()}),),
        golden=GoldenSpec(file=_GOLDEN, metric="cosine", max_loss={VARIANT: _ROUNDING}),
    )
    write_spec(spec, folder)
    return folder


def _golden(datatype: str, shape: tuple[int, ...]) -> Array:
    """Small numbers that every datatype holds, and no row all zero."""
    count = int(np.prod(shape, dtype=np.int64))
    return (np.arange(count) % 2 + 1).astype(dtype_of(datatype, "datatype")).reshape(shape)
