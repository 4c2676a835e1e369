"""How long a batch takes: L(n) = a + b * n seconds, measured when an engine warms up, corrected by each batch."""

from __future__ import annotations

from collections.abc import Callable


class LatencyModel:
    """`base_s` + `per_row_s` * rows. `observe` scales the line by a forgetting average of measured over predicted."""

    FORGET = 0.1
    BOUNDS = (0.05, 20.0)  # a clock jump or one page fault must not make the model believe in miracles

    def __init__(self, base_s: float, per_row_s: float) -> None:
        self.base_s, self.per_row_s = max(base_s, 0.0), max(per_row_s, 0.0)
        self._scale = 1.0

    def seconds(self, rows: int) -> float:
        return self._scale * self._line(rows)

    def observe(self, rows: int, seconds: float) -> None:
        line = self._line(rows)
        if line <= 0:
            self.base_s = seconds
            return
        low, high = self.BOUNDS
        ratio = min(max(seconds / line, low), high)
        self._scale += self.FORGET * (ratio - self._scale)

    def _line(self, rows: int) -> float:
        return self.base_s + self.per_row_s * rows


def measure(
    run: Callable[[int], object], max_batch: int, clock: Callable[[], float], *, repeats: int = 3
) -> LatencyModel:
    """Fits the line through the medians of `run(1)` and `run(n)`, n = min(max_batch, 8), after one call of each."""
    large = min(max_batch, 8)

    def median(rows: int) -> float:
        run(rows)
        times = []
        for _ in range(repeats):
            start = clock()
            run(rows)
            times.append(clock() - start)
        return sorted(times)[len(times) // 2]

    one = median(1)
    if large == 1:
        return LatencyModel(one, 0.0)
    per_row = max(0.0, (median(large) - one) / (large - 1))
    return LatencyModel(max(0.0, one - per_row), per_row)
