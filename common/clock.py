"""Time as something that is handed in: monotonic for durations, the wall clock for what people or signatures read.

A `Moment` is a time that can be written down and read by a later process, after a restart or a reboot.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """`boot_s` counts from the machine's start and never steps: the truth for as long as `boot` is the same."""

    boot: str
    boot_s: float
    wall_s: float

    def age_s(self, now: Moment) -> float:
        """Seconds from this moment to `now`; below 0 only for one that no clock of this machine has shown.

        From another boot it is what the wall clock says, and never less than the time since this boot: a machine that
        starts with a wrong wall clock (no battery, or set back) takes what it finds for written as it started.
        """
        if self.boot and self.boot == now.boot:
            return now.boot_s - self.boot_s
        return max(now.boot_s, now.wall_s - self.wall_s)


class BootClock(Protocol):
    def moment(self) -> Moment: ...


class SystemBootClock:
    """Asks the wall clock once: a later step, either way, makes nothing older or younger."""

    def __init__(self) -> None:
        try:
            self._boot = _BOOT_ID.read_text(encoding="ascii").strip()
        except OSError:
            self._boot = ""  # every start then counts as another boot
        self._started_wall_s = time.time() - _boot_s()

    def moment(self) -> Moment:
        boot_s = _boot_s()
        return Moment(boot=self._boot, boot_s=boot_s, wall_s=self._started_wall_s + boot_s)


def _boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine sleeps, unlike CLOCK_MONOTONIC
