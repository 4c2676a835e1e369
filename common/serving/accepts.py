"""The quick look at a request: is it plainly what the model takes? Made once per engine, asked on every call.

Says only yes, with the rows, or that it cannot tell; `prepare.check` then says what is wrong, or that nothing is
(pictures, free dimensions). The two agree: what this accepts, the check accepts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from common.bundle import ModelConfig
from common.request import Request
from common.tensors import BYTES, dtype_of


class Accepts:
    """`outputs`: the names of the model's outputs, in its order."""

    __slots__ = ("_inputs", "_max_batch", "_outputs", "outputs")

    def __init__(self, config: ModelConfig) -> None:
        self.outputs = tuple(spec.name for spec in config.outputs)
        self._outputs = frozenset(self.outputs)
        self._max_batch = config.max_batch
        self._inputs: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            spec.name: (dtype_of(spec.datatype, spec.name), spec.shape[1:])
            for spec in config.inputs
            if not (spec.datatype == BYTES and config.image is not None)
        }
        if len(self._inputs) < len(config.inputs) or any(spec.shape[:1] != (-1,) for spec in config.inputs):
            self._inputs = {}  # nothing is plain

    def rows(self, request: Request) -> int:
        """Rows of a request that is plainly in order; 0 where the full check has to look."""
        inputs = request.inputs
        if request.classes or len(inputs) != len(self._inputs) or not self._outputs.issuperset(request.outputs):
            return 0
        rows = 0
        for name, array in inputs.items():
            declared = self._inputs.get(name)
            shape = array.shape
            if declared is None or array.dtype is not declared[0] or not shape or shape[1:] != declared[1]:
                return 0
            if rows and shape[0] != rows:
                return 0
            rows = shape[0]
        return rows if rows <= self._max_batch else 0
