"""The model configuration extension: what stock clients read of a model before they call it.

Pure. Triton's names and rules: with a `max_batch_size`, `dims` leave the batch out; 0 says that the model has none, and
then they are the whole shape. The rest of Triton's configuration concerns its own back-ends and is not given.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.serving.catalog import ModelMetadata
from common.tensors import BYTES, TensorSpec

MAX_BATCH = "max_batch_size"


def render(metadata: ModelMetadata) -> dict[str, Any]:
    """The configuration as JSON has it; the gRPC message is made from the same fields."""
    is_batched = metadata.max_batch > 0
    return {
        "name": metadata.name,
        "platform": metadata.platform,
        "backend": metadata.platform.rpartition("_")[0] or metadata.platform,
        MAX_BATCH: metadata.max_batch,
        "input": _tensors(metadata.inputs, is_batched),
        "output": _tensors(metadata.outputs, is_batched),
    }


def _tensors(specs: Iterable[TensorSpec], is_batched: bool) -> list[dict[str, Any]]:
    return [
        {"name": s.name, "data_type": _data_type(s.datatype), "dims": list(s.shape[1:] if is_batched else s.shape)}
        for s in specs
    ]


def _data_type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}"
