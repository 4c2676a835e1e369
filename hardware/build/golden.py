"""The golden set: a few held-out rows and FP32's answers, by which a node judges an engine as it was built there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.bundle import GoldenSpec
from common.tensorfile import write_tensors
from common.tensors import Array
from hardware.build.data import Rows
from hardware.build.mixed import Built
from hardware.gate import Reference, allowance, loss

FILE = "golden.safetensors"
_FEWEST, _MOST = 8, 32
_BYTES = 3 << 20  # every node fetches the set, so pictures are few


def pick(rows: Rows) -> Array:
    """Indices of golden rows, spread evenly over the held-out set; they depend on its size alone, never on a model."""
    row_bytes = sum(array.nbytes for array in rows.inputs.values()) // len(rows)
    count = min(len(rows), _MOST, max(_FEWEST, _BYTES // max(1, row_bytes)))
    return np.unique(np.linspace(0, len(rows) - 1, count).round().astype(np.int64))


def write_golden(path: Path, rows: Rows, outputs: dict[str, Array], index: Array) -> None:
    """`rows` and FP32's `outputs` are the whole held-out set; those at `index` are written."""
    chosen = rows.take(index)
    tensors = {f"input.{name}": array for name, array in chosen.inputs.items()}
    tensors |= {f"output.{name}": array[index] for name, array in outputs.items()}
    if chosen.labels is not None:
        tensors["labels"] = chosen.labels
    write_tensors(path / FILE, tensors)


def golden_spec(reference: Reference, variants: Sequence[Built], index: Array, max_drop: float) -> GoldenSpec:
    """What each variant may lose on the golden rows.

    A variant that missed the gate (and was built all the same) gets what a good one would: a node will refuse it.
    """
    few = replace(
        reference,
        outputs=reference.outputs[index],
        labels=None if reference.labels is None else reference.labels[index],
        groups=None,
    )
    max_loss = {}
    for built in variants:
        measured = loss(few, built.answers[index]) if built.report.is_within_gate else 0.0
        max_loss[built.report.name] = round(allowance(reference.metric, measured, max_drop, len(index)), 6)
    return GoldenSpec(file=FILE, metric=reference.metric, max_loss=max_loss)
