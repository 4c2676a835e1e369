"""How long a batch takes: L(n) = a + b * n seconds, measured when an engine warms up, learnt from each batch.

The line is fitted by recursive least squares with forgetting (Ljung, System Identification, 1999, section 11.2) on
relative errors, so that a quick batch weighs as much as a slow one; a quick scale before it follows what changes at
once (another process, a colder clock); a running quantile says how far above that a batch may come out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_MANY = 2**31 - 1  # rows, where a row more costs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What a model has learnt, to begin with the next time. `residual`: relative, of 95 % of the batches."""

    base_s: float
    per_row_s: float
    residual: float = 0.0


class LatencyModel:
    """`seconds` is what to expect, `bound` what 95 % of the batches stay within.

    One odd batch cannot move the estimate far, and what nothing confirms falls back towards the line that it began
    with: an estimate that keeps requests away must not outlive its cause, since then no request would ever correct it.
    """

    SCALE_GAIN = 0.2
    BOUNDS = (0.5, 2.0)  # of one observation, times the present estimate
    FORGET = 0.98  # of the line, a batch: it remembers some fifty
    HALF_LIFE_S = 10.0  # of what has not been observed again
    QUANTILE, QUANTILE_GAIN = 0.95, 0.02
    _UNSURE = 0.04  # variance of the warm-up's line, relative
    FRESH_S = 1.0  # before it begins to count less

    __slots__ = ("_a", "_b", "_began", "_observed_at", "_over", "_paa", "_pab", "_pbb", "_scale", "_widest")
    _a: float  # the line: a + b * n
    _b: float
    _began: Line
    _scale: float
    _over: float
    _paa: float  # covariance of (a, b)
    _pab: float
    _pbb: float
    _widest: tuple[float, float]

    def __init__(self, base_s: float, per_row_s: float, *, observed_at: float = float("-inf")) -> None:
        self._observed_at = observed_at
        self.begin(Line(base_s=max(base_s, 0.0), per_row_s=max(per_row_s, 0.0)))

    @property
    def line(self) -> Line:
        return Line(base_s=self._a, per_row_s=self._b, residual=self._over)

    def reset(self) -> None:
        """Forgets what was learnt, as after a change of clocks or of heat: what it began with is as good a guess."""
        self.begin(self._began)

    def seconds(self, rows: int, now: float) -> float:
        """Expected seconds of a batch that starts at monotonic time `now`."""
        base, per_row = self._line_at(now)
        return base + per_row * rows

    def bound(self, rows: int, now: float) -> float:
        """Seconds that 95 % of such batches stay within."""
        base, per_row = self._line_at(now)
        return (1.0 + self._over) * (base + per_row * rows)

    def queued(self, rows: int, max_rows: int, now: float) -> float:
        """What `rows` add to a queue that is served in full batches."""
        return self.seconds(max_rows, now) * rows / max_rows

    def rows_within(self, seconds: float, now: float) -> int:
        """The most rows of a batch whose bound is at most `seconds`; 0 where not even one would be."""
        base, per_row = self._line_at(now)
        left = seconds / (1.0 + self._over) - base
        if left < per_row or left < 0:
            return 0
        return int(min(left / per_row, _MANY)) if per_row else _MANY

    def is_stale(self, now: float) -> bool:
        """Nothing has been observed for so long that the estimate is worth a try."""
        return now - self._observed_at > 3 * self.HALF_LIFE_S

    def observe(self, rows: int, seconds: float, now: float) -> None:
        idle = now - seconds - self._observed_at - self.FRESH_S
        if idle > 0:
            self._settle(idle)
        self._observed_at = now
        line = self._a + self._b * rows
        if line <= 0:
            self.begin(Line(base_s=seconds, per_row_s=0.0))
            return
        low, high = self.BOUNDS
        measured = seconds / line
        ratio = measured / self._scale
        self._over += self.QUANTILE_GAIN * (self.QUANTILE - (ratio - 1.0 <= self._over))
        self._over = min(max(self._over, 0.0), high - 1.0)
        self._scale *= 1.0 + self.SCALE_GAIN * (min(max(ratio, low), high) - 1.0)
        self._fit(1.0 / line, rows / line, min(max(measured, low), high) - 1.0)

    def _fit(self, one: float, rows: float, error: float) -> None:
        """One step of recursive least squares: the regressors (1, n) and the error, all over the line's value."""
        ka, kb = self._paa * one + self._pab * rows, self._pab * one + self._pbb * rows
        gain = 1.0 / (self.FORGET + one * ka + rows * kb)
        self._a = max(0.0, self._a + ka * gain * error)
        self._b = max(0.0, self._b + kb * gain * error)
        paa, pab, pbb = self._paa - ka * ka * gain, self._pab - ka * kb * gain, self._pbb - kb * kb * gain
        if paa < self._widest[0] and pbb < self._widest[1]:  # what batches of one size cannot tell stays bounded
            paa, pab, pbb = paa / self.FORGET, pab / self.FORGET, pbb / self.FORGET
        self._paa, self._pab, self._pbb = paa, pab, pbb

    def begin(self, line: Line) -> None:
        """Starts anew from what was measured or learnt before."""
        self._began, self._over, self._scale = line, line.residual, 1.0
        self._a, self._b = line.base_s, line.per_row_s
        one = line.base_s + line.per_row_s
        self._paa, self._pab, self._pbb = self._UNSURE * one * one, 0.0, self._UNSURE * one * one / 64
        self._widest = (25 * self._paa, 25 * self._pbb)

    def _line_at(self, now: float) -> tuple[float, float]:
        a, b = self._scale * self._a, self._scale * self._b
        idle = now - self._observed_at - self.FRESH_S
        if idle <= 0:
            return a, b
        kept, began = 0.5 ** (idle / self.HALF_LIFE_S), self._began
        return began.base_s + (a - began.base_s) * kept, began.per_row_s + (b - began.per_row_s) * kept

    def _settle(self, idle: float) -> None:
        """Of what was learnt, that counts which is left after so long without a batch."""
        kept, began = 0.5 ** (idle / self.HALF_LIFE_S), self._began
        self._a = began.base_s + (self._a - began.base_s) * kept
        self._b = began.per_row_s + (self._b - began.per_row_s) * kept
        self._scale = 1.0 + (self._scale - 1.0) * kept
        self._over = began.residual + (self._over - began.residual) * kept


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
