"""Named places where a test may stop the agent: before them everything is done, after them nothing. Off otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

NAMES: Final = (
    "admitted",
    "reserved",
    "fetching",
    "slab written",
    "assembled",
    "renamed",
    "placed",
    "building",
    "prepared",
    "gated",
    "activated",
    "on probation",
    "committed",
    "rolling back",
    "reverted",
)
_on: list[Callable[[str], None]] = []


def failpoint(name: str) -> None:
    for stop in _on:
        stop(name)


@contextmanager
def stopping(stop: Callable[[str], None]) -> Iterator[None]:
    """Calls `stop` with the name of each place that is reached, in any thread."""
    _on.append(stop)
    try:
        yield
    finally:
        _on.remove(stop)
