"""ONNX Runtime as the build uses it: a session over a model in memory or on disk. The build's only importer of it.

Engines that serve requests live in `hardware/engines/`; here rows go through a model as fast as a batch allows.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from common.errors import BuildError
from common.tensors import Array
from hardware.build.data import Rows

_QUIET = 3  # errors only
THREADS = min(4, os.cpu_count() or 1)


class Session:
    """A model that answers. `optimized=False` keeps every Q/DQ node: integer arithmetic simulated in float."""

    def __init__(self, model: bytes | Path, *, optimized: bool = True, threads: int = THREADS) -> None:
        options = _options(threads)
        if not optimized:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = _open(str(model) if isinstance(model, Path) else model, options)
        self.inputs = tuple(item.name for item in self._session.get_inputs())
        self.outputs = tuple(item.name for item in self._session.get_outputs())

    def run(self, feeds: dict[str, Array]) -> dict[str, Array]:
        try:
            return dict(zip(self.outputs, self._session.run(None, feeds), strict=True))
        except Exception as exc:  # ONNX Runtime's own exceptions share no base class
            raise BuildError(f"the model does not run on its inputs: {exc}") from exc

    def run_rows(self, rows: Rows, *, batch: int = 8) -> dict[str, Array]:
        """Answers to all rows, by output name."""
        parts = [self.run(feeds) for feeds in rows.feeds(batch)]
        return {name: np.concatenate([part[name] for part in parts]) for name in self.outputs}


def fold_constants(source: Path, target: Path) -> None:
    """Writes the model with constants folded and paddings merged, still in standard operators."""
    options = _options(1)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(target)
    _open(str(source), options)


def _options(threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _QUIET
    return options


def _open(model: str | bytes, options: Any) -> Any:
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as exc:  # as above
        raise BuildError(f"ONNX Runtime cannot open the model: {exc}") from exc
