"""A bundle's golden set run on an engine that was built here: its answers judged against FP32's.

How a piece of it is run the caller says: on an engine that nobody uses yet, or as requests to one that serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from common.bundle import Bundle, ModelConfig
from common.images import normalize
from common.tensors import Array
from hardware.gate import judge

Run = Callable[[Mapping[str, Array], int], Mapping[str, Array]]  # inputs and their rows -> outputs, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    passed: bool
    detail: str


def golden_verdict(bundle: Bundle, variant: str, config: ModelConfig, run: Run) -> Verdict:
    """Runs the set in batches that `config` takes. What `run` raises is passed on."""
    golden = bundle.golden()
    result = judge(bundle.spec, variant, golden, _answers(config, golden, run))
    lost = f"{result.metric} loss {result.loss:.4f}, allowed {result.allowed:.4f}"
    return Verdict(passed=result.passed, detail=f"{lost}; {result.problem}" if result.problem else lost)


def _answers(config: ModelConfig, golden: Mapping[str, Array], run: Run) -> dict[str, Array]:
    inputs = {spec.name: golden[f"input.{spec.name}"] for spec in config.inputs}
    if config.image is not None:
        inputs = {name: normalize(pixels, config.image) for name, pixels in inputs.items()}
    rows = len(next(iter(inputs.values())))
    parts: list[Mapping[str, Array]] = []
    for start in range(0, rows, config.max_batch):
        piece = {name: array[start : start + config.max_batch] for name, array in inputs.items()}
        parts.append(run(piece, min(config.max_batch, rows - start)))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
