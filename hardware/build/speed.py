"""How fast one model is against another: interleaved calls, so that a busy machine slows both alike."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from common.tensors import Array
from hardware.build.session import Session

_WARM_UP = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Median milliseconds of a call, one row, one thread, all optimizations on."""

    reference_ms: float
    candidate_ms: float

    @property
    def ratio(self) -> float:
        return self.reference_ms / self.candidate_ms


def compare(reference: Path | bytes, candidate: Path | bytes, feeds: dict[str, Array], *, calls: int = 100) -> Speed:
    """Times `calls` calls of each model in turn on the same row."""
    sessions = [Session(model, threads=1) for model in (reference, candidate)]
    taken: tuple[list[float], list[float]] = ([], [])
    for i in range(_WARM_UP + calls):
        for session, times in zip(sessions, taken, strict=True):
            began = time.perf_counter()
            session.run(feeds)
            if i >= _WARM_UP:
                times.append(time.perf_counter() - began)
    fp32, other = (1000 * statistics.median(times) for times in taken)
    return Speed(reference_ms=fp32, candidate_ms=other)
