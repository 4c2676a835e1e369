"""Slabs from nodes nearby, asked before the source: as they are, not as differences; a local network costs nobody.

Nothing a peer says is believed: a slab is its own hash. One that is dead, slow or lies is left alone for a minute, and
the rest comes from the next one or from the source: peers save bytes there, they are never needed.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from common.errors import FetchError
from sync.agent.client import GrpcSource
from sync.agent.ports import Range, never
from sync.release import SlabEntry
from sync.slabs import slab_id

logger = logging.getLogger(__name__)

DIAL_S: Final = 0.2
LEFT_ALONE_S: Final = 60.0
FOLDER: Final = "slabs"  # of the names that peers know
_CALL_S: Final = 20.0
_FLOOR_BYTES_S: Final = 100e3  # a local network has more, and the source may have
_FLOOR_WINDOW_S: Final = 2.0
_BATCH_BYTES: Final = 8 << 20
_BATCH_SLABS: Final = 1024


def raw_name(slab: str) -> str:
    """What a peer calls the raw bytes of a slab."""
    return f"{FOLDER}/{slab}"


class Peers:
    """Nodes at `addresses` (host:port), over plain gRPC. Used from one thread; `close` from any."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._sources = {address: _source(address) for address in addresses}
        self._monotonic, self._rng = monotonic, rng or random.Random()
        self._alone_until: dict[str, float] = {}

    def fetch(
        self, slabs: Sequence[SlabEntry], cancelled: Callable[[], bool] = never
    ) -> Iterator[tuple[SlabEntry, bytes]]:
        """What some peer has of `slabs`, each at most once and as its id says. Raises nothing but `FetchCancelled`."""
        left = {slab.id: slab for slab in slabs}
        for address in self._rng.sample(sorted(self._sources), len(self._sources)):
            if not left:
                return
            if self._monotonic() < self._alone_until.get(address, 0.0):
                continue
            try:
                for slab, raw in self._from(self._sources[address], list(left.values()), cancelled):
                    del left[slab.id]
                    yield slab, raw
            except FetchError as exc:
                logger.info("peer %s is left alone for %g s: %s", address, LEFT_ALONE_S, exc)
                self._alone_until[address] = self._monotonic() + LEFT_ALONE_S

    def close(self) -> None:
        for source in self._sources.values():
            source.close()

    def _from(
        self, source: GrpcSource, slabs: Sequence[SlabEntry], cancelled: Callable[[], bool]
    ) -> Iterator[tuple[SlabEntry, bytes]]:
        """What one peer has. Where it has nothing of a whole batch, it is not asked for the rest."""
        source.dial(DIAL_S)
        for batch in _batches(slabs):
            has_some = False
            for slab, raw in _answers(source, batch, cancelled):
                if raw is None:
                    continue
                if slab_id(raw) != slab.id:
                    raise FetchError(raw_name(slab.id), "other bytes came than its name says", is_permanent=True)
                has_some = True
                yield slab, raw
            if not has_some:
                return


def _source(address: str) -> GrpcSource:
    return GrpcSource(address, timeout_s=_CALL_S, floor_bytes_s=_FLOOR_BYTES_S, floor_window_s=_FLOOR_WINDOW_S)


def _answers(
    source: GrpcSource, batch: Sequence[SlabEntry], cancelled: Callable[[], bool]
) -> Iterator[tuple[SlabEntry, bytes | None]]:
    ranges = [Range(name=raw_name(slab.id), length=slab.length) for slab in batch]
    data = bytearray()
    for part in source.stream(ranges, cancelled=cancelled):
        data += part.data
        if part.is_last:
            yield batch[part.number], None if part.is_missing else bytes(data)
            data.clear()


def _batches(slabs: Sequence[SlabEntry]) -> Iterator[list[SlabEntry]]:
    batch: list[SlabEntry] = []
    size = 0
    for slab in slabs:
        if batch and (size + slab.length > _BATCH_BYTES or len(batch) == _BATCH_SLABS):
            yield batch
            batch, size = [], 0
        batch.append(slab)
        size += slab.length
    if batch:
        yield batch
