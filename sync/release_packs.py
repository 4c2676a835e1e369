"""The packs in a store: from which release to which, what goes into them, what they save.

A slab is packed against the one at the same place (file and key) of the base release, if that has its length and its
kind of elements. The base's bytes are taken from the store, the new ones from the bundle's files.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import BundleError, CorruptPack, CorruptSlab
from sync import codec
from sync.codec.choice import Pair
from sync.containers import Layout, Tensor, read_layout
from sync.containers.layout import ROW_OF_NONE
from sync.deltas import Change, write_pack
from sync.packs import Index, is_sound, parse_index
from sync.release import FileEntry, Manifest, SlabEntry
from sync.slabs import Cut, cut, read_pieces, slab_id
from sync.store.stores import AnyStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file of a bundle, and how it is cut."""

    name: str
    path: Path
    layout: Layout
    cuts: tuple[Cut, ...]

    @classmethod
    def of(cls, name: str, path: Path) -> Source:
        layout = read_layout(path)
        return cls(name=name, path=path, layout=layout, cuts=cut(layout))

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)

    def changed(self) -> BundleError:
        return BundleError(str(self.path), "changed while it was being published")


class ReleasePacks:
    """Callers hold the store's lock around `write`."""

    def __init__(self, store: AnyStore) -> None:
        self._store = store

    def write(self, manifest: Manifest, base: Manifest, sources: Mapping[str, Source], *, heals: bool) -> None:
        """The pack from `base` to `manifest`. One that the store has stays, unless it `heals` and finds damage."""
        target_digest, base_digest = manifest.digest(), base.digest()
        has_one = self.index(manifest, base) is not None
        if has_one and not (heals and not self._is_sound(manifest, base)):
            return
        self._store.drop_pack(target_digest, base_digest)
        places = list(_places(manifest, base))
        if places:
            self._write(manifest, base, lambda: self._changes(places, sources))

    def rebuild(self, manifest: Manifest, base: Manifest) -> None:
        """The pack anew, from objects alone; what is missing of those travels whole. The old one stays until then."""
        places = list(_places(manifest, base))
        if places:
            self._write(manifest, base, lambda: self._stored_changes(places, manifest))
        else:
            self._store.drop_pack(manifest.digest(), base.digest())

    def index(self, target: Manifest, base: Manifest) -> Index | None:
        """None where there is none, or a damaged one."""
        data = self._store.index(target.digest(), base.digest())
        try:
            return None if data is None else parse_index(data, base=base, target=target)
        except CorruptPack:
            return None

    def cost(self, slabs: Iterable[str], target: Manifest, base: Manifest | None) -> dict[str, int]:
        """Bytes by form that `slabs` of `target` cost a node that has `base`: each in its smallest form, and what else
        has to be fetched for that (`tables`, `index`)."""
        index = None if base is None else self.index(target, base)
        smallest: dict[str, codec.Header] = {}
        for entry in () if index is None else index.entries:
            best = smallest.setdefault(entry.header.slab, entry.header)
            if entry.header.payload_length < best.payload_length:
                smallest[entry.header.slab] = entry.header
        found: Counter[str] = Counter()
        tables: set[int] = set()
        for slab in slabs:
            header = smallest.get(slab)
            if header is None:
                found["full"] += self._store.full_bytes(slab) or 0
                continue
            found[header.form_name] += header.payload_length
            if header.form == codec.CTX:
                tables.add(header.tables)
        if index is not None and found:
            found["index"] = len(self._store.index(index.target, index.base) or b"")
            found["tables"] = sum(index.tables[number].length for number in tables)
        return {form: count for form, count in sorted(found.items()) if count}

    def _write(self, manifest: Manifest, base: Manifest, changes: Callable[[], Iterator[Change]]) -> None:
        """No pack, where every slab is better off alone."""
        ends = (manifest.digest(), base.digest())
        with self._store.new_pack(*ends) as file:
            index = write_pack(file, changes, base=base, target=manifest, folder=Path(file.name).parent)
        if index is None:
            self._store.drop_pack(*ends)
        else:
            self._store.put_index(*ends, index)

    def _stored_changes(self, places: list[_Place], manifest: Manifest) -> Iterator[Change]:
        rows = {file.path: _rows(file) for file in manifest.files}
        for place in places:
            slab, raw, base = place.slab, self._raw(place.slab), self._raw(place.base)
            if raw is not None and base is not None:
                row = rows[place.file].get(place.number, ROW_OF_NONE)
                pair = Pair(
                    raw=raw, base=base, base_id=place.base.id, width=slab.width, mantissa=slab.mantissa, row=row
                )
                yield Change(pair=pair, full_bytes=self._store.full_bytes(slab.id) or 0)

    def _changes(self, places: list[_Place], sources: Mapping[str, Source]) -> Iterator[Change]:
        for name, group in itertools.groupby(places, key=lambda place: place.file):
            source = sources[name]
            with source.opened() as fd:
                for place in group:
                    base = self._raw(place.base)
                    if base is not None:
                        full_bytes = self._store.full_bytes(place.slab.id) or 0
                        yield Change(pair=_pair(fd, source, place, base), full_bytes=full_bytes)

    def _raw(self, slab: SlabEntry) -> bytes | None:
        """From the store; None when it is gone or damaged there: then there is no difference, that is all."""
        data = self._store.full(slab.id)
        try:
            return None if data is None else codec.decode_object(data, slab=slab.id, length=slab.length)
        except CorruptSlab:
            return None

    def _is_sound(self, target: Manifest, base: Manifest) -> bool:
        index = self.index(target, base)
        with self._store.open_pack(target.digest(), base.digest()) as file:
            return index is not None and file is not None and is_sound(index, file)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A slab that the base release does not have, and what that has there. `number`: of the slab in its file."""

    file: str
    number: int
    slab: SlabEntry
    base: SlabEntry


def _places(manifest: Manifest, base: Manifest) -> Iterator[_Place]:
    known = base.slabs()
    before = {(file.path, slab.key): slab for file in base.files for slab in file.slabs}
    done: set[str] = set()
    for file in manifest.files:
        for number, slab in enumerate(file.slabs):
            old = before.get((file.path, slab.key))
            if old is not None and slab.id not in known and slab.id not in done and _are_alike(slab, old):
                done.add(slab.id)
                yield _Place(file=file.path, number=number, slab=slab, base=old)


def _are_alike(slab: SlabEntry, base: SlabEntry) -> bool:
    return (slab.length, slab.width, slab.mantissa) == (base.length, base.width, base.mantissa)


def _rows(file: FileEntry) -> dict[int, int]:
    """Elements in a row, by the number of the slab: as the file was cut."""
    rows = {}
    for entry in file.tensors:
        for number in entry.slabs:
            if file.slabs[number].key.startswith("t/"):
                tensor = Tensor(name=entry.name, dtype=entry.dtype, shape=entry.shape, offset=entry.offset, length=0)
                rows[number] = tensor.row
    return rows


def _pair(fd: int, source: Source, place: _Place, base: bytes) -> Pair:
    raw = read_pieces(fd, place.slab.pieces)
    if slab_id(raw) != place.slab.id:
        raise source.changed()
    slab, row = place.slab, source.cuts[place.number].row
    return Pair(raw=raw, base=base, base_id=place.base.id, width=slab.width, mantissa=slab.mantissa, row=row)
