"""What the agent is handed: how a staged release becomes the thing that serves, and where bytes come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common.bundle import Variant


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A slab to fetch, and the slabs that this node has just proven to hold (none: `full`)."""

    id: str
    length: int
    bases: tuple[str, ...] = ()


class Source(Protocol):
    """Where metadata and slabs come from. Nothing it says is believed. Raises `FetchError`."""

    def read(self, name: str) -> Iterator[bytes]:
        """A signed file, in chunks. A permanent `FetchError` when there is none of that name."""
        ...

    def fetch(self, wants: Sequence[Want]) -> Iterator[tuple[str, bytes]]:
        """(slab id, object) for each of `wants`, in their order."""
        ...

    def close(self) -> None: ...
