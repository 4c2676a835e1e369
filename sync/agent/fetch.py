"""Putting a release together in a staging folder: what the node has is copied, what is missing is fetched.

A missing slab comes as a difference to one that is here, out of the pack that leads from an installed release to this
one, or else in full. Nothing on the disk is taken on faith: a slab counts as local only after its bytes were read and
hashed, in the staging folder (an interrupted fetch goes on where it was) or in the files of an installed version. Slabs
stream: one is in memory at a time.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from common.errors import BadRelease, CorruptPack, CorruptSlab, FetchError
from sync import codec
from sync.agent.journal import Release
from sync.agent.local import LocalSlabs, file_hash, read_slab
from sync.agent.offers import Link, Offer, Offers, Pack
from sync.agent.ports import Range, Source
from sync.codec import max_object_bytes
from sync.packs import Index, max_index_bytes, parse_index
from sync.release import FileEntry, SlabEntry
from sync.slabs import slab_id, write_pieces
from sync.store import index_name, object_name, sync_folder

logger = logging.getLogger(__name__)

BATCH_BYTES: Final = 4 << 20  # asked for in one call: bounds what a broken connection costs
BATCH_RAW_BYTES: Final = 64 << 20  # and what there is to decode while the call lasts
BATCH_SLABS: Final = 1024


@dataclass(slots=True, kw_only=True)
class Fetched:
    """What one assembly cost. Bytes as received, by form: payloads, whole `full` objects, `tables` and `index`."""

    bytes_by_form: Counter[str] = field(default_factory=Counter)
    fetched: int = 0
    reused: int = 0
    fallbacks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Want:
    """A slab to fetch: as a pack offers it, or in full."""

    slab: SlabEntry
    offer: Offer | None = None

    @property
    def range(self) -> Range:
        if self.offer is not None:
            return self.offer.range
        return Range(name=object_name(self.slab.id), limit=max_object_bytes(self.slab.length))

    @property
    def bytes(self) -> int:
        """About what comes over the wire."""
        return self.slab.length if self.offer is None else self.offer.range.length


class Assembly:
    """One release being put together in `folder`."""

    def __init__(self, release: Release, folder: Path, local: LocalSlabs) -> None:
        self._folder, self._local = folder, local
        paths = set(release.paths())
        self._manifest, self._digest = release.manifest, release.manifest.digest()
        self._files = [file for file in release.manifest.files if file.path in paths]
        self._places: dict[str, list[tuple[FileEntry, SlabEntry]]] = {}
        for file in self._files:
            for slab in file.slabs:
                self._places.setdefault(slab.id, []).append((file, slab))

    def run(self, source: Source, result: Fetched) -> None:
        """Fills the folder, counting into `result` as it goes.

        Raises `FetchError` (try again: what is here stays), or `BadRelease` when slabs do not add up to the file.
        """
        missing = self._take_local(result)
        self._fetch(source, missing, result)
        for file in self._files:
            _finish(self._folder / file.path, file, self._manifest.name)
        for folder in {self._folder / parent for file in self._files for parent in Path(file.path).parents}:
            sync_folder(folder)

    def _take_local(self, result: Fetched) -> list[SlabEntry]:
        """Copies every slab that is on this disk; returns the others."""
        names = {self._folder / file.path for file in self._files}
        for path in self._folder.rglob("*"):
            if path not in names and not path.is_dir():
                path.unlink()  # of an earlier try, when the node took another variant
        for file in self._files:
            _make_file(self._folder / file.path, file.size)
        missing = []
        for slab, places in self._places.items():
            if self._is_staged(slab):
                continue
            raw = self._local.read(slab)
            if raw is not None:
                self._write(slab, raw)
                result.reused += 1
            else:
                missing.append(places[0][1])
        return missing

    def _is_staged(self, slab: str) -> bool:
        """All places of the slab in the staging folder hold it already: an earlier try got this far."""
        for file, entry in self._places[slab]:
            raw = read_slab(self._folder / file.path, entry.pieces)
            if raw is None or slab_id(raw) != slab:
                return False
        return True

    def _fetch(self, source: Source, missing: Sequence[SlabEntry], result: Fetched) -> None:
        offers = self._offers(source, missing, result)
        again: list[SlabEntry] = []
        for batch in _batches(_Want(slab=slab, offer=offers.best(slab)) for slab in missing):
            again += self._fetch_batch(source, batch, offers.link, result)
        result.fallbacks += len(again)
        for batch in _batches(_Want(slab=slab) for slab in again):
            self._fetch_batch(source, batch, offers.link, result)

    def _offers(self, source: Source, missing: Sequence[SlabEntry], result: Fetched) -> Offers:
        """Newest release first; an older one is asked about only where it has another base than those before it."""
        offers, wanted = Offers(self._local.holds), {slab.id for slab in missing}
        tried: set[str] = set()
        for release in self._local.releases():
            bases = self._bases(release, (slab for slab in missing if not offers.knows(slab)))
            index = self._index(source, release, result) if bases - tried else None
            if index is not None:
                offers.add(Pack(index, wanted))
                tried |= bases
        return offers

    def _bases(self, release: str, slabs: Iterable[SlabEntry]) -> set[str]:
        """What a release has at the places of `slabs`."""
        found = (self._local.base_in(release, file.path, one) for slab in slabs for file, one in self._places[slab.id])
        return set() if release == self._digest else {base for base in found if base is not None}

    def _index(self, source: Source, base: str, result: Fetched) -> Index | None:
        """None where there is none, or none that this version reads: then its slabs come in full."""
        limit = max_index_bytes(len(self._manifest.slabs()))
        try:
            data = next(source.fetch([Range(name=index_name(self._digest, base), limit=limit)]), None)
        except FetchError as exc:
            if exc.is_permanent:
                return None
            raise
        if data is None:
            return None
        result.bytes_by_form["index"] += len(data)
        try:
            return parse_index(data, base=self._local.manifest(base), target=self._manifest)
        except CorruptPack as exc:
            logger.warning("%s", exc)
            return None

    def _fetch_batch(self, source: Source, batch: Sequence[_Want], link: Link, result: Fetched) -> list[SlabEntry]:
        """One call. Returns the slabs whose difference was no good."""
        tables = _tables_of(batch)
        ranges = [pack.tables_range(number) for pack, number in tables]
        answers = link.timed(source.fetch([*ranges, *(want.range for want in batch)]))
        failed = []
        for pack, number in tables:
            data = _next(answers, "a table set")
            result.bytes_by_form["tables"] += len(data or b"")
            pack.accept_tables(number, data)
        for want in batch:
            data = _next(answers, f"slab {want.slab.id}")
            try:
                self._accept(want, data, result)
            except CorruptSlab as exc:
                if want.offer is None:
                    raise FetchError(f"slab {exc.slab}", f"the full object is corrupt: {exc.problem}") from exc
                failed.append(want.slab)
        return failed

    def _accept(self, want: _Want, data: bytes | None, result: Fetched) -> None:
        slab, offer = want.slab, want.offer
        if data is None:
            if offer is None:
                raise FetchError(f"slab {slab.id}", "the service does not have it", is_permanent=True)
            raise CorruptSlab(slab.id, "the pack ends before it")
        if offer is None:
            result.bytes_by_form["full"] += len(data)
            raw = codec.decode_object(data, slab=slab.id, length=slab.length)
        else:
            header = offer.entry.header
            result.bytes_by_form[header.form_name] += len(data)
            base, tables = self._local.read(header.base or ""), offer.pack.tables(header.tables)
            raw = codec.decode(header, data, base=base, tables=tables)
        self._write(slab.id, raw)
        result.fetched += 1

    def _write(self, slab: str, raw: bytes) -> None:
        for file, entry in self._places[slab]:
            fd = os.open(self._folder / file.path, os.O_WRONLY)
            try:
                write_pieces(fd, entry.pieces, raw)
            finally:
                os.close(fd)


def _next(answers: Iterator[bytes | None], what: str) -> bytes | None:
    """One too few is a `FetchError`."""
    for data in answers:
        return data
    raise FetchError(what, "the answer ended early")


def _tables_of(batch: Sequence[_Want]) -> list[tuple[Pack, int]]:
    """The table sets that the batch needs and that have not been asked for yet."""
    offers = [want.offer for want in batch if want.offer is not None]
    needed = {(one.pack, one.tables): None for one in offers if one.tables is not None}
    return [(pack, number) for pack, number in needed if number is not None and not pack.has_asked(number)]


def _batches(wants: Iterable[_Want]) -> Iterator[list[_Want]]:
    batch: list[_Want] = []
    wire = raw = 0
    for want in wants:
        wire, raw = wire + want.bytes, raw + want.slab.length
        if batch and (wire > BATCH_BYTES or raw > BATCH_RAW_BYTES or len(batch) == BATCH_SLABS):
            yield batch
            batch, wire, raw = [], want.bytes, want.slab.length
        batch.append(want)
    if batch:
        yield batch


def _make_file(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.truncate(size)


def _finish(path: Path, file: FileEntry, release: str) -> None:
    """The whole file's hash, then its bytes on the disk."""
    if file_hash(path) != file.digest:
        raise BadRelease(release, f"file {file.path}: its slabs do not give the hash that the manifest declares")
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
