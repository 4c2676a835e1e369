"""What the agent is handed: how a staged release becomes the thing that serves, and where bytes come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from common.bundle import Variant
from common.serving.vitals import Vitals


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A verified release on this node's disk: `folder` is a bundle folder with the files of one variant."""

    model: str
    version: str
    folder: Path
    variant: str
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """What the golden set said about an engine as built here."""

    passed: bool
    detail: str


class Verdict(Protocol):
    """`GateVerdict`, or anything with its two fields: an installer need not know this package."""

    @property
    def passed(self) -> bool: ...
    @property
    def detail(self) -> str: ...


class Installer(Protocol):
    """Called from the agent's thread only, one call at a time.

    `prepare` and `gate` raise `EngineError`, `BuildError` or `InvalidRequest` when the release itself is no good: it is
    put in quarantine. Any other exception is tried again a few times.
    """

    def can_run(self, model: str, engine: str, variant: Variant) -> bool:
        """Does this node have `engine` for `model`, and what else `variant` asks for (memory, SKU)?"""
        ...

    def prepare(self, staged: Staged) -> Any:
        """Builds an engine beside the one that serves."""
        ...

    def gate(self, prepared: Any) -> Verdict: ...

    def activate(self, prepared: Any) -> None:
        """Swaps; after the return the new version serves."""
        ...

    def discard(self, prepared: Any) -> None:
        """Releases what `prepare` made; the version that serves is untouched."""
        ...

    # What follows `activate`: the version before stays ready until one of `settle`, `revert` and `withdraw`.

    def vitals(self, model: str) -> tuple[Vitals, Vitals | None] | None:
        """How the version that was activated last does, and how the one before it did; None where nobody knows."""
        ...

    def recheck(self, model: str) -> Verdict | None:
        """The golden set once more, on what serves; None where that cannot be said now."""
        ...

    def settle(self, model: str) -> None:
        """The version that serves stays."""
        ...

    def revert(self, model: str) -> bool:
        """Swaps back to the version before, at once; False where it is not ready any more and nothing was changed."""
        ...

    def withdraw(self, model: str, reason: str) -> None:
        """Nothing of this model serves here any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bytes of an immutable file (an object, an index, a part of a pack): `length` from `offset` on.

    `length` 0: everything from `offset` on, of a file that has at most `limit` bytes.
    """

    name: str
    offset: int = 0
    length: int = 0
    limit: int = 0

    @property
    def most(self) -> int:
        """How many bytes the answer may have."""
        return self.length or self.limit


class Source(Protocol):
    """Where metadata, slabs and packs come from. Nothing it says is believed. Raises `FetchError`."""

    def read(self, name: str) -> Iterator[bytes]:
        """A signed file, in chunks. A permanent `FetchError` when there is none of that name."""
        ...

    def fetch(self, ranges: Sequence[Range]) -> Iterator[bytes | None]:
        """The bytes of each of `ranges`, in their order; None where there is no such file, or less of it.

        A permanent `FetchError` where a whole file is longer than its limit.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes of one of the ranges that were asked for, in their order. `is_missing`: no such file, or less of it."""

    number: int  # of the range, from 0
    data: bytes
    is_last: bool
    is_missing: bool = False


def never() -> bool:
    """Nobody cancels."""
    return False


@runtime_checkable
class Streaming(Protocol):
    """A `Source` that gives bytes away as they come: a range that broke off can be asked for from there."""

    def stream(self, ranges: Sequence[Range], *, cancelled: Callable[[], bool] = never) -> Iterator[Part]:
        """At least one part of each range. `cancelled` is asked several times a second, from the caller's thread.

        Raises as `Source.fetch` does, and `FetchCancelled`.
        """
        ...
