"""How long a batch takes: L(n) = a + b * n seconds, measured when an engine warms up, corrected by each batch."""

from __future__ import annotations

from collections.abc import Callable

_MANY = 2**31 - 1  # rows, where a row more costs nothing


class LatencyModel:
    """`base_s` + `per_row_s` * rows, scaled by a forgetting average of measured over predicted.

    One odd batch cannot move the scale far, and a scale that nothing confirms falls back towards the warm-up's line:
    an estimate that keeps requests away must not outlive its cause, since then no request would ever correct it.
    """

    FORGET = 0.2
    BOUNDS = (0.5, 2.0)  # of one observation, times the present estimate
    HALF_LIFE_S = 10.0  # of what has not been observed again
    _FRESH_S = 0.01

    def __init__(self, base_s: float, per_row_s: float, *, observed_at: float = float("-inf")) -> None:
        self.base_s, self.per_row_s = max(base_s, 0.0), max(per_row_s, 0.0)
        self._scale = 1.0
        self._observed_at = observed_at

    def seconds(self, rows: int, now: float) -> float:
        """Predicted seconds of a batch that starts at monotonic time `now`."""
        return self._scale_at(now) * self._line(rows)

    def queued(self, rows: int, max_rows: int, now: float) -> float:
        """What `rows` add to a queue that is served in full batches."""
        return self.seconds(max_rows, now) * rows / max_rows

    def rows_within(self, seconds: float, now: float) -> int:
        """The most rows of a batch that is predicted to take at most `seconds`; 0 where not even one would."""
        left = seconds / self._scale_at(now) - self.base_s
        if left < self.per_row_s or left < 0:
            return 0
        return int(min(left / self.per_row_s, _MANY)) if self.per_row_s else _MANY

    def is_stale(self, now: float) -> bool:
        """Nothing has been observed for so long that the estimate is worth a try."""
        return now - self._observed_at > 3 * self.HALF_LIFE_S

    def observe(self, rows: int, seconds: float, now: float) -> None:
        scale = self._scale_at(now)
        line = self._line(rows)
        if line <= 0:
            self.base_s = seconds
        else:
            low, high = self.BOUNDS
            self._scale = scale + self.FORGET * (min(max(seconds / line, low * scale), high * scale) - scale)
        self._observed_at = now

    def _scale_at(self, now: float) -> float:
        idle = now - self._observed_at
        if idle < self._FRESH_S:  # of no consequence, and the hot path of a busy device
            return self._scale
        return float(1.0 + (self._scale - 1.0) * 0.5 ** (idle / self.HALF_LIFE_S))

    def _line(self, rows: int) -> float:
        return self.base_s + self.per_row_s * rows


def measure(
    run: Callable[[int], object], max_batch: int, clock: Callable[[], float], *, repeats: int = 3
) -> LatencyModel:
    """Fits the line through the quickest of `repeats` runs of 1 row and of n = min(max_batch, 8), once warm.

    The quickest, since what else the machine is doing only ever adds.
    """
    large = min(max_batch, 8)

    def quickest(rows: int) -> float:
        run(rows)
        times = []
        for _ in range(repeats):
            start = clock()
            run(rows)
            times.append(clock() - start)
        return min(times)

    one = quickest(1)
    if large == 1:
        return LatencyModel(one, 0.0, observed_at=clock())
    per_row = max(0.0, (quickest(large) - one) / (large - 1))
    return LatencyModel(max(0.0, one - per_row), per_row, observed_at=clock())
