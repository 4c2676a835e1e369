"""What time it is at least, without I/O: rules for nodes whose clock may be wrong (no battery: 1970, a bad one: 2099).

Every file of metadata says when it was signed (`signed_at`, under the signature), so a verified file proves that it is
not earlier. The latest such time is a floor that never sinks; a clock below it is wrong. Nothing proves that a clock is
ahead: then signatures look expired, which is said together with what the clock reads, and nothing is kept of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

SLACK: Final = timedelta(days=1)  # a publisher's clock may be ahead by so much, time zones mixed up included
_FIELD: Final = "signed_at"
_FORM: Final = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """`now`: the time to go by. `verdict`: `trusted`, or `behind` when the clock is before the floor."""

    now: datetime
    clock: datetime
    floor: datetime | None

    @property
    def is_trusted(self) -> bool:
        return self.floor is None or self.clock >= self.floor - SLACK

    @property
    def verdict(self) -> str:
        return "trusted" if self.is_trusted else "behind"

    def __str__(self) -> str:
        read = f"this node's clock reads {self.clock:%Y-%m-%d %H:%M}"
        return read if self.floor is None else f"{read}, the newest signed time is {self.floor:%Y-%m-%d %H:%M}"


def read_time(clock: datetime, floor: datetime | None) -> Reading:
    """What a clock says, held against the floor."""
    return Reading(now=clock if floor is None else max(clock, floor), clock=clock, floor=floor)


def raise_time(floor: datetime | None, proven: datetime | None) -> datetime | None:
    """The new floor, after verified metadata that proves a time (or none). It never sinks."""
    known = [one for one in (floor, proven) if one is not None]
    return max(known, default=None)


def write_signed_at(signed: Any, now: datetime) -> None:
    """Into what is about to be signed."""
    signed.unrecognized_fields[_FIELD] = now.astimezone(UTC).strftime(_FORM)


def read_signed_at(signed: Any) -> datetime | None:
    """From verified metadata. None where it does not say, or says what cannot be: after its own end."""
    text = signed.unrecognized_fields.get(_FIELD)
    try:
        found = datetime.strptime(text, _FORM).replace(tzinfo=UTC)
    except (TypeError, ValueError):
        return None
    return found if found <= signed.expires else None
