"""Putting a release together in a staging folder: what the node has is copied, what is missing is fetched.

A missing slab comes as a difference to one that is here, out of the pack that leads from an installed release to this
one, or else in full. Nothing on the disk is taken on faith: a slab counts as local only after its bytes were read and
hashed, in the staging folder (an interrupted fetch goes on where it was) or in the files of an installed version. Slabs
stream: one is in memory at a time.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from common.errors import CorruptPack, CorruptSlab, FetchCancelled, FetchError
from sync import codec
from sync.agent.download import Answer, Download
from sync.agent.failpoints import failpoint
from sync.agent.journal import Release
from sync.agent.local import LocalSlabs
from sync.agent.offers import Link, Offers, Pack
from sync.agent.partial import Partials
from sync.agent.peers import Peers
from sync.agent.ports import Range, Source, never
from sync.agent.staging import Staging
from sync.agent.wants import Want, batches, between, tables_of
from sync.packs import Index, max_index_bytes, parse_index
from sync.release import Manifest, SlabEntry
from sync.store import index_name

logger = logging.getLogger(__name__)

CHAIN_BYTES: Final = 256 << 10  # of slabs that it takes for a chain to be worth two indexes


@dataclass(slots=True, kw_only=True)
class Fetched:
    """What one assembly cost. Bytes as received, by form: payloads, whole `full` objects, `tables`,
    `index`, and what came from a `peer` (as it is)."""

    bytes_by_form: Counter[str] = field(default_factory=Counter)
    fetched: int = 0
    reused: int = 0
    fallbacks: int = 0
    breaks: int = 0  # connections that broke and were gone on from


class Assembly:
    """One release being put together in `folder`."""

    def __init__(
        self,
        release: Release,
        folder: Path,
        local: LocalSlabs,
        *,
        cancelled: Callable[[], bool] = never,
        manifest_of: Callable[[str], Manifest | None] = lambda version: None,
        peers: Peers | None = None,
    ) -> None:
        """`cancelled` is asked several times a second: is the release not wanted any more? `manifest_of`: the signed
        manifest of another version of the model, by way of which differences may lead from an old release to this one.
        `peers` are asked before the source."""
        self._local, self._cancelled, self._manifest_of = local, cancelled, manifest_of
        self._peers = Peers(()) if peers is None else peers
        self._manifest, self._digest = release.manifest, release.manifest.digest()
        self._staging = Staging(folder, release.manifest, release.paths(), cancelled)

    def run(self, source: Source, result: Fetched) -> None:
        """Fills the folder, counting into `result` as it goes.

        Raises `FetchError` (what is here stays; another process may be at it), `FetchCancelled`, or `BadRelease` when
        slabs do not add up to the file.
        """
        with self._staging.opened(), contextlib.closing(self._local):
            partials = Partials(self._staging.partials)
            download = Download(source, partials, self._cancelled)
            try:
                self._fetch(download, self._ask_peers(self._take_local(result), result), result)
            finally:
                partials.close()
                result.breaks += download.breaks
            partials.remove()
            self._staging.finish()

    def _take_local(self, result: Fetched) -> list[SlabEntry]:
        """Copies every slab that is on this disk; returns the others."""
        missing = []
        for slab in self._staging.slabs():
            if self._cancelled():
                raise FetchCancelled(self._manifest.name)
            if self._staging.holds(slab.id):
                continue
            raw = self._local.read(slab.id)
            if raw is not None:
                self._staging.write(slab.id, raw)
                result.reused += 1
            else:
                missing.append(slab)
        return missing

    def _ask_peers(self, missing: Sequence[SlabEntry], result: Fetched) -> list[SlabEntry]:
        """Writes what nodes nearby have; returns the others."""
        left = {slab.id: slab for slab in missing}
        for slab, raw in self._peers.fetch(missing, self._cancelled):
            self._staging.write(slab.id, raw)
            result.bytes_by_form["peer"] += len(raw)
            result.fetched += 1
            failpoint("slab written")
            del left[slab.id]
        return list(left.values())

    def _fetch(self, download: Download, missing: Sequence[SlabEntry], result: Fetched) -> None:
        offers = self._offers(download, missing, result)
        again: list[SlabEntry] = []
        wants = (Want(slab=slab, way=offers.best(slab, download.begun)) for slab in missing)
        for batch in batches(wants, offers.link):
            again += self._fetch_batch(download, batch, offers.link, result)
        result.fallbacks += len(again)
        for batch in batches((Want(slab=slab) for slab in again), offers.link):
            self._fetch_batch(download, batch, offers.link, result)

    def _offers(self, download: Download, missing: Sequence[SlabEntry], result: Fetched) -> Offers:
        """Newest release first; an older one is asked about only where it has another base than those before it."""
        offers, wanted = Offers(self._local.holds), {slab.id for slab in missing}
        tried: set[str] = set()
        for release in self._local.releases():
            bases = self._bases(release, (slab for slab in missing if not offers.knows(slab)))
            if not bases - tried:
                continue
            index = self._index(download, self._local.manifest(release), self._manifest, result)
            if index is not None:
                offers.add(Pack(index, wanted))
                tried |= bases
        stranded = [slab for slab in missing if not offers.knows(slab)]
        if sum(slab.length for slab in stranded) >= CHAIN_BYTES:
            self._add_chain(download, offers, stranded, result)
        return offers

    def _add_chain(self, download: Download, offers: Offers, stranded: Sequence[SlabEntry], result: Fetched) -> None:
        """For slabs that no pack leads to from here: two packs, by way of a release between."""
        wanted = {slab.id for slab in stranded}
        for release in self._local.releases():
            if not self._bases(release, stranded):
                continue
            base = self._local.manifest(release)
            for version in between(base.version, self._manifest.version):
                middle = self._manifest_of(version)
                index = None if middle is None else self._index(download, middle, self._manifest, result)
                if middle is None or index is None:
                    continue
                last = Pack(index, wanted)
                offers.add(last)
                index = self._index(download, base, middle, result)
                if index is not None:
                    offers.add(Pack(index, wanted | last.bases()))
                    offers.has_chains = True
                    return

    def _bases(self, release: str, slabs: Iterable[SlabEntry]) -> set[str]:
        """What a release has at the places of `slabs`."""
        places = ((file, one) for slab in slabs for file, one in self._staging.places(slab.id))
        found = (self._local.base_in(release, file.path, one) for file, one in places)
        return set() if release == self._digest else {base for base in found if base is not None}

    def _index(self, download: Download, base: Manifest, target: Manifest, result: Fetched) -> Index | None:
        """None where there is none, or none that this version reads: then its slabs come in full."""
        limit = max_index_bytes(len(target.slabs()))
        wanted = Range(name=index_name(target.digest(), base.digest()), limit=limit)
        try:
            answer = next(download.get([wanted], keeps=1))
        except FetchError as exc:
            if exc.is_permanent:
                return None
            raise
        if answer.data is None:
            return None
        result.bytes_by_form["index"] += answer.received
        try:
            return parse_index(answer.data, base=base, target=target)
        except CorruptPack as exc:
            download.forget(wanted)
            if answer.is_resumed:  # the part that was on the disk may be what is wrong
                return self._index(download, base, target, result)
            logger.warning("%s", exc)
            return None

    def _fetch_batch(self, download: Download, batch: Sequence[Want], link: Link, result: Fetched) -> list[SlabEntry]:
        """One call. Returns the slabs whose difference was no good."""
        tables = tables_of(batch)
        ranges = [pack.tables_range(number) for pack, number in tables]
        ranges += [one for want in batch for one in want.ranges]
        with contextlib.closing(download.get(ranges, keeps=len(tables))) as came:
            answers = link.timed(came)
            for pack, number in tables:
                self._accept_tables(pack, number, next(answers), download, result)
            return [want.slab for want in batch if not self._is_good(want, answers, download, result)]

    def _accept_tables(self, pack: Pack, number: int, answer: Answer, download: Download, result: Fetched) -> None:
        if answer.is_resumed and not pack.is_sound(number, answer.data):
            download.forget(pack.tables_range(number))
            answer = next(download.get([pack.tables_range(number)]))
        result.bytes_by_form["tables"] += answer.received
        pack.accept_tables(number, answer.data)

    def _is_good(self, want: Want, answers: Iterator[Answer], download: Download, result: Fetched) -> bool:
        """The slab is where it belongs; False: its difference was no good. `FetchError` where that is so of a full."""
        try:
            self._accept(want, [next(answers) for _ in want.ranges], download, result)
        except CorruptSlab as exc:
            if not want.way:
                raise FetchError(f"slab {exc.slab}", f"the full object is corrupt: {exc.problem}") from exc
            return False
        return True

    def _accept(self, want: Want, answers: Sequence[Answer], download: Download, result: Fetched) -> None:
        """Raises `CorruptSlab`, a permanent `FetchError` where there is no such object."""
        try:
            raw = self._decoded(want, answers, result)
        except CorruptSlab:
            if not any(one.is_resumed for one in answers):
                raise
            raw = self._decoded(want, list(download.get(want.ranges)), result)  # once, and all of it
        self._staging.write(want.slab.id, raw)
        result.fetched += 1
        failpoint("slab written")

    def _decoded(self, want: Want, answers: Sequence[Answer], result: Fetched) -> bytes:
        slab = want.slab
        if not want.way:
            (answer,) = answers
            if answer.data is None:
                raise FetchError(f"slab {slab.id}", "the service does not have it", is_permanent=True)
            result.bytes_by_form["full"] += len(answer.data)
            return codec.decode_object(answer.data, slab=slab.id, length=slab.length)
        raw = self._local.read(want.way[0].entry.header.base or "")
        for offer, answer in zip(want.way, answers, strict=True):
            header = offer.entry.header
            if answer.data is None:
                raise CorruptSlab(slab.id, "the pack ends before it")
            result.bytes_by_form[header.form_name] += len(answer.data)
            raw = codec.decode(header, answer.data, base=raw, tables=offer.pack.tables(header.tables))
        assert raw is not None
        return raw
