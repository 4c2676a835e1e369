"""When the agent polls next, without I/O: each interval, jittered; after failures with a growing, random delay.

The phase is drawn anew when an outage ends, so that nodes which failed together do not come back together.
"""

from __future__ import annotations

import random
from typing import Final

_JITTER: Final = 0.1
_FIRST_BACKOFF_S: Final = 1.0


class PollSchedule:
    """All times are seconds of a monotonic clock."""

    def __init__(self, interval_s: float, min_gap_s: float, rng: random.Random) -> None:
        self._interval_s, self._min_gap_s, self._rng = interval_s, min_gap_s, rng
        self._failures = 0
        self._last: float | None = None
        self._hinted_at: float | None = None
        self.next_at = 0.0  # the first poll is due at once

    @property
    def is_behind(self) -> bool:
        """The last poll left something to be tried again."""
        return self._failures > 0

    def begin(self) -> None:
        """A poll begins: hints up to here are answered by it, later ones ask for another."""
        self._hinted_at = None

    def done(self, now: float, *, is_ok: bool) -> None:
        """A poll has ended."""
        self._last = now
        if is_ok:
            spread = (0.0, 1.0) if self._failures else (1 - _JITTER, 1 + _JITTER)
            self._failures = 0
            self.next_at = now + self._interval_s * self._rng.uniform(*spread)
        else:
            longest = min(self._interval_s, _FIRST_BACKOFF_S * 2 ** min(self._failures, 32))
            self._failures += 1
            self.next_at = now + longest * self._rng.uniform(0.5, 1.0)
        if self._hinted_at is not None:
            self.next_at = min(self.next_at, max(self._hinted_at, now + self._min_gap_s))

    def at_latest(self, at: float) -> None:
        """Something is due then: a poll no later."""
        self.next_at = min(self.next_at, at)

    def hint(self, now: float, spread_s: float) -> None:
        """Somebody says that there is news: one early poll, somewhere in the spread, not before the minimal gap."""
        at = now + self._rng.uniform(0.0, min(max(spread_s, 0.0), self._interval_s))
        if self._last is not None:
            at = max(at, self._last + self._min_gap_s)
        self._hinted_at = at
        self.next_at = min(self.next_at, at)
