"""What packs offer a node: for each missing slab the form that is there soonest, against a base that it has.

Only chooses. Indexes and table sets are checked when they come in; whether a base is really on the disk, the caller
says.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from common.errors import CorruptSlab
from sync.agent.download import Answer
from sync.agent.ports import Range
from sync.codec import CTX, SAME, TableSet, parse_tables, payload_hash
from sync.codec.choice import seconds
from sync.packs import Entry, Index
from sync.release import SlabEntry
from sync.store import pack_name

FIRST_RATE: Final = 1.25e6  # bytes/s (10 Mbit/s): what a link is taken for until it has shown more
CHAIN_SHARE: Final = 0.65  # of a slab's length: its full has more in all kinds of weights (bf16: two thirds)
_GUESS_BYTES: Final = 256 << 10  # how much that guess weighs


class Link:
    """How fast bytes come in, by the time spent waiting for them: they also come in while others are decoded."""

    def __init__(self) -> None:
        self._bytes, self._seconds = float(_GUESS_BYTES), _GUESS_BYTES / FIRST_RATE

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self._bytes / self._seconds

    def timed(self, answers: Iterator[Answer]) -> Iterator[Answer]:
        while True:
            started = time.monotonic()
            try:
                answer = next(answers)
            except StopIteration:
                return
            self._seconds += time.monotonic() - started
            self._bytes += answer.received
            yield answer


class Pack:
    """One index, as far as it speaks of `wanted` slabs, and the table sets that have come so far."""

    def __init__(self, index: Index, wanted: Collection[str]) -> None:
        self._name, self._ranges = pack_name(index.target, index.base), index.tables
        self._entries: dict[str, list[Entry]] = {}
        for entry in index.entries:
            if entry.header.slab in wanted:
                self._entries.setdefault(entry.header.slab, []).append(entry)
        self._tables: dict[int, TableSet | None] = {}  # None: it is no good

    def entries(self, slab: str) -> Sequence[Entry]:
        return self._entries.get(slab, ())

    def bases(self) -> set[str]:
        """Of its entries."""
        return {entry.header.base or "" for entries in self._entries.values() for entry in entries}

    def payload_range(self, entry: Entry) -> Range:
        return Range(name=self._name, offset=entry.offset, length=entry.header.payload_length)

    def tables_range(self, number: int) -> Range:
        return Range(name=self._name, offset=self._ranges[number].offset, length=self._ranges[number].length)

    def has_asked(self, number: int) -> bool:
        """The table set has come, good or not."""
        return number in self._tables

    def is_sound(self, number: int, data: bytes | None) -> bool:
        return data is not None and payload_hash(data) == self._ranges[number].digest

    def accept_tables(self, number: int, data: bytes | None) -> None:
        """A table set that is no good costs the entries that need it, nothing else."""
        self._tables[number] = None
        if data is not None and self.is_sound(number, data):
            try:
                self._tables[number] = parse_tables(data)
            except CorruptSlab:
                return

    def tables(self, number: int) -> TableSet | None:
        return self._tables.get(number)

    def is_decodable(self, entry: Entry) -> bool:
        """False for a form of later times, or where the table set turned out bad. `same` has nothing to fetch."""
        header = entry.header
        lacks_tables = header.form == CTX and self.has_asked(header.tables) and self.tables(header.tables) is None
        return header.form != SAME and math.isfinite(seconds(header, FIRST_RATE)) and not lacks_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One entry of one pack."""

    pack: Pack
    entry: Entry

    @property
    def range(self) -> Range:
        return self.pack.payload_range(self.entry)

    @property
    def tables(self) -> int | None:
        """The number of the table set that it needs."""
        return self.entry.header.tables if self.entry.header.form == CTX else None


class Offers:
    """The packs that could help, and the link that they would come over."""

    def __init__(self, holds: Callable[[str], bool]) -> None:
        """`holds`: is this slab proven to be on the disk now?"""
        self._holds, self._packs = holds, list[Pack]()
        self.link, self.has_chains = Link(), False

    def add(self, pack: Pack) -> None:
        self._packs.append(pack)

    def knows(self, slab: SlabEntry) -> bool:
        return any(True for _ in self._found(slab.id, slab.length))

    def best(self, slab: SlabEntry, begun: Callable[[Range], int]) -> tuple[Offer, ...]:
        """The way to a slab that would be there soonest at the link's speed: one difference to a slab that is here, or
        where there is none two, by way of a slab of a release between. Empty: the slab has to come in full.

        `begun`: bytes of a range that are here already.
        """
        rate = self.link.rate

        def wait_s(way: tuple[Offer, ...]) -> float:
            return sum(seconds(one.entry.header, rate) - begun(one.range) / rate for one in way)

        direct = sorted(((one,) for one in self._found(slab.id, slab.length)), key=wait_s)
        ways = itertools.chain(direct, sorted(self._chains(slab), key=wait_s) if self.has_chains else ())
        return next((way for way in ways if self._holds(way[0].entry.header.base or "")), ())

    def _chains(self, slab: SlabEntry) -> Iterator[tuple[Offer, ...]]:
        for last in self._found(slab.id, slab.length):
            for first in self._found(last.entry.header.base or "", slab.length):
                if first.range.length + last.range.length < CHAIN_SHARE * slab.length:
                    yield first, last

    def _found(self, slab: str, length: int) -> Iterator[Offer]:
        for pack in self._packs:
            for entry in pack.entries(slab):
                if entry.header.raw_length == length and pack.is_decodable(entry):
                    yield Offer(pack=pack, entry=entry)
