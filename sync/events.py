"""What the parameter path reports while it works: frozen events to one callable. Metrics and logs are hooks on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PollDone:
    """The agent asked the service for the desired state. `error` is None when it was reached and believed."""

    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabsFetched:
    """A fetch has ended, complete or broken off. `bytes_by_form` counts what came over the wire:
    payloads by form, whole `full` objects, `tables` and `index`."""

    model: str
    version: str
    bytes_by_form: Mapping[str, int]
    fetched: int
    reused: int
    fallbacks: int  # slabs whose delta was no good, fetched again as `full`
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged:
    model: str
    version: str
    old: str
    new: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A release is refused for good: it is not fetched again until another content is desired."""

    model: str
    version: str
    digest: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A version serves. `was_restored`: from this node's disk at start, without the network."""

    model: str
    version: str
    was_restored: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFailed:
    """One model could not be brought up to date; it is tried again, the old version serves."""

    model: str
    error: str


Event = PollDone | SlabsFetched | StateChanged | Quarantined | Installed | SyncFailed
Hook = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The hook of whoever does not listen."""
