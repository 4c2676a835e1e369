"""Maintenance windows: when a node may fetch and install. Pure; times of day are UTC."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

_FORM: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class Window:
    """Each day from `start` to `end` (minutes after midnight); over midnight where `end` is the smaller."""

    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Window:
        """``HH:MM-HH:MM``. Raises `ValueError`."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"window must be HH:MM-HH:MM (UTC), got {text!r}")
        hours, minutes, until_hours, until_minutes = map(int, found.groups())
        window = cls(60 * hours + minutes, 60 * until_hours + until_minutes)
        if window.start == window.end:
            raise ValueError(f"window {text!r} has no length; leave it out for the whole day")
        return window

    def __str__(self) -> str:
        return f"{self.start // 60:02}:{self.start % 60:02}-{self.end // 60:02}:{self.end % 60:02} UTC"

    def opens_at(self, now: datetime) -> datetime | None:
        """When it opens next; None while it is open."""
        now = now.astimezone(UTC)
        minute = 60 * now.hour + now.minute
        if self.start < self.end:
            is_open = self.start <= minute < self.end
        else:
            is_open = minute >= self.start or minute < self.end
        if is_open:
            return None
        opens = now.replace(hour=self.start // 60, minute=self.start % 60, second=0, microsecond=0)
        return opens if opens > now else opens + timedelta(days=1)
