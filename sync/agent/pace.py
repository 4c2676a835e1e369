"""How fast bytes may, must and do come in: the rate limit, the floor, and how much one message may carry.

Rules only: time and bytes are arguments.
"""

from __future__ import annotations

from typing import Final

BURST_BYTES: Final = 128 << 10
MIN_PIECE_BYTES: Final = 2 << 10
START_PIECE_BYTES: Final = 64 << 10
MAX_PIECE_BYTES: Final = 256 << 10  # what takes the least work, on a link that has shown that it holds
_PIECES_PER_BREAK: Final = 160  # half a piece is lost each time: .3 % of what comes between two breaks
_PROOF_BYTES: Final = 16 << 20  # without a break, for pieces larger than at the start
_PIECES_PER_SECOND: Final = 8  # under a rate limit, so that bytes come evenly


class Bucket:
    """A rate limit: `rate` bytes/s on average, `BURST_BYTES` at once."""

    def __init__(self, rate: float) -> None:
        self._rate, self._burst = rate, min(float(BURST_BYTES), rate)
        self._left, self._at = self._burst, 0.0

    def take(self, count: int, now: float) -> float:
        """Seconds to wait after `count` bytes came at `now`."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate) - count
        self._at = now
        return max(0.0, -self._left / self._rate)


class Floor:
    """Whoever sends has to keep up `rate` bytes/s over each `window_s` seconds that were spent waiting for it."""

    def __init__(self, rate: float, window_s: float) -> None:
        self.rate, self._window_s = rate, window_s
        self._seconds, self._bytes = 0.0, 0

    def slow(self, seconds: float, count: int) -> tuple[float, int] | None:
        """Of `seconds` waited and `count` bytes since the call began: those of a window that was too slow."""
        waited, came = seconds - self._seconds, count - self._bytes
        if waited < self._window_s:
            return None
        if came < self.rate * waited:
            return waited, came
        self._seconds, self._bytes = seconds, count
        return None


class Grain:
    """How many bytes a message may have: one that breaks off is lost, so on a link that often does they are few."""

    def __init__(self, rate: float | None = None) -> None:
        """`rate`: limit in bytes/s."""
        self._most = MAX_PIECE_BYTES if rate is None else _clamped(rate / _PIECES_PER_SECOND)
        self._start = self.piece_bytes = min(START_PIECE_BYTES, self._most)
        self._since_break = self._since_change = 0

    @property
    def is_coarse(self) -> bool:
        """The link has not shown itself to be a bad one."""
        return self.piece_bytes >= self._start

    def came(self, count: int) -> None:
        """A link that holds gets larger ones."""
        self._since_break += count
        self._since_change += count
        enough = _PROOF_BYTES if self.is_coarse else 4 * _PIECES_PER_BREAK * self.piece_bytes
        if self._since_change > enough:
            self.piece_bytes, self._since_change = min(self._most, 2 * self.piece_bytes), 0

    def broke(self) -> None:
        """The connection did. One that broke before anything came says nothing."""
        if self._since_break:
            self.piece_bytes = min(self._start, _clamped(self._since_break / _PIECES_PER_BREAK))
        self._since_break = self._since_change = 0


def _clamped(count: float) -> int:
    """A power of two within the limits."""
    return min(MAX_PIECE_BYTES, max(MIN_PIECE_BYTES, 1 << (max(1, int(count)).bit_length() - 1)))
