"""What an assembly asks for: slabs, the way each one comes, and how many of them in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sync.agent.offers import Link, Offer, Pack
from sync.agent.ports import Range
from sync.codec import max_object_bytes
from sync.release import SlabEntry
from sync.store import object_name

BATCH_BYTES: Final = 4 << 20  # asked for in one call: what waits to be decoded is in memory
BATCH_RAW_BYTES: Final = 64 << 20  # and what there is to decode while the call lasts
BATCH_SLABS: Final = 1024
BATCH_S: Final = 15.0  # a call should not run into its deadline on a slow link


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A slab to fetch: as packs offer it, step by step from a slab that is here, or in full."""

    slab: SlabEntry
    way: tuple[Offer, ...] = ()

    @property
    def ranges(self) -> tuple[Range, ...]:
        whole = Range(name=object_name(self.slab.id), limit=max_object_bytes(self.slab.length))
        return tuple(one.range for one in self.way) or (whole,)

    @property
    def bytes(self) -> int:
        """About what comes over the wire."""
        return sum(one.range.length for one in self.way) or self.slab.length


def between(base: str, target: str) -> list[str]:
    """Versions by way of which two packs may lead from one to the other: the one in the middle has the best chances,
    wherever the bases of packs end."""
    first, last = int(base), int(target)
    middle = (first + last) // 2
    return [str(one) for one in (middle, middle + 1, middle - 1) if first < one < last]


def tables_of(batch: Sequence[Want]) -> list[tuple[Pack, int]]:
    """The table sets that the batch needs and that have not been asked for yet."""
    offers = [offer for want in batch for offer in want.way]
    needed = {(one.pack, one.tables): None for one in offers if one.tables is not None}
    return [(pack, number) for pack, number in needed if number is not None and not pack.has_asked(number)]


def batches(wants: Iterable[Want], link: Link) -> Iterator[list[Want]]:
    """What one call asks for: as much as a slow link brings in a while, and not more than is good for a fast one."""
    batch: list[Want] = []
    wire = raw = 0
    for want in wants:
        wire, raw = wire + want.bytes, raw + want.slab.length
        most = min(BATCH_BYTES, link.rate * BATCH_S)
        if batch and (wire > most or raw > BATCH_RAW_BYTES or len(batch) == BATCH_SLABS):
            yield batch
            batch, wire, raw = [], want.bytes, want.slab.length
        batch.append(want)
    if batch:
        yield batch
