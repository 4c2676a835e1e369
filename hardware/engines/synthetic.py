"""Synthetic: an echo that takes a_ms + b_ms x rows and fails as it is told (`drill.py`): benchmarks and drills.

It sleeps instead of computing, so that one machine can play a device of any speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from common.errors import EngineError
from common.serving.engine import Batch, EngineFingerprint, Outputs
from common.serving.latency import LatencyModel
from common.tensors import Array
from hardware.engines.base import EngineRequest, warm_up
from hardware.engines.echo import EchoEngine, echoed


class SyntheticEngine:
    def __init__(self, request: EngineRequest, echo: EchoEngine) -> None:
        self._config, self._drill, self._echo = request.config, request.drill, echo
        self._strikes = request.drill.strikes()
        self.fingerprint = EngineFingerprint(
            engine="synthetic", engine_version="1", variant=request.variant, device="sleep"
        )

    def warm(self) -> LatencyModel:
        return warm_up(self._healthy, self._config)

    def run(self, batch: Batch) -> list[Outputs | Exception]:
        fault = self._drill.fault if next(self._strikes) else "none"
        if fault == "raise":
            raise EngineError(self._config.name, "the drill says so")
        if fault == "hang":
            time.sleep(self._drill.hang_s)
        if fault == "slow":
            time.sleep(self._drill.seconds(batch.rows) * (self._drill.slow_factor - 1))
        answers = self._healthy(batch)
        if fault == "wrong_rows":
            return [_mapped(answer, lambda array: array[:-1]) for answer in answers]
        if fault == "nan":
            return [_mapped(answer, _nan) for answer in answers]
        return answers

    def close(self) -> None:
        self._echo.close()

    def _healthy(self, batch: Batch) -> list[Outputs | Exception]:
        started = time.monotonic()
        answers = self._echo.run(batch)
        time.sleep(max(0.0, started + self._drill.seconds(batch.rows) - time.monotonic()))
        return answers


def open_engine(request: EngineRequest) -> SyntheticEngine:
    """Raises `EngineError` for a config that cannot be echoed, or that has nothing to make NaN of."""
    config = request.config
    if request.drill.fault == "nan" and not any(output.datatype.startswith("FP") for output in config.outputs):
        raise EngineError(config.name, "fault 'nan' needs a floating output")
    return SyntheticEngine(request, EchoEngine(request, echoed(config)))


def _mapped(answer: Outputs | Exception, change: Callable[[Array], Array]) -> Outputs | Exception:
    return answer if isinstance(answer, Exception) else {name: change(array) for name, array in answer.items()}


def _nan(array: Array) -> Array:
    return np.full_like(array, np.nan) if array.dtype.kind == "f" else array
