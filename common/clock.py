"""Time as something that is handed in: monotonic for durations, the wall clock for what people or signatures read."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never steps."""
        ...

    def now(self) -> datetime:
        """The wall clock, UTC; may step either way."""
        ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> datetime:
        return datetime.now(UTC)
