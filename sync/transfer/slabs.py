"""From a carried file to a store's objects and packs: nothing is written that was not decoded to its id first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import IO, Final

from common.errors import BadRelease, CorruptPack, CorruptSlab
from sync import codec
from sync.codec import CTX, TableSet, max_object_bytes, parse_tables, payload_hash
from sync.packs import Entry, Index, TableRange, max_index_bytes, parse_index
from sync.release import Manifest, SlabEntry
from sync.store import index_name, object_name, pack_name
from sync.store.stores import AnyStore
from sync.transfer.carried import Carried
from sync.upkeep.catalog import Catalog

_PACK: Final = re.compile(r"packs/([0-9a-f]{64})/([0-9a-f]{64})\.(?:pack|index)")


class Slabs:
    """Callers hold the store's lock. `catalog`: the releases that the store has."""

    def __init__(self, carried: Carried, store: AnyStore, catalog: Catalog) -> None:
        self._carried, self._store, self._catalog = carried, store, catalog

    def take(self, manifests: Sequence[Manifest]) -> int:
        """Everything that these releases need and the store lacks; returns how many slabs that was.

        Raises `CorruptSlab`, `CorruptPack`, or `BadRelease` where something is missing or does not belong.
        """
        wanted = {slab: entry for one in manifests for slab, entry in one.slabs().items()}
        self._check_names(wanted, manifests)
        taken = sum(self._object(slab) for slab in wanted.values())
        packs = {match.groups() for name in self._carried.names("packs") if (match := _PACK.fullmatch(name))}
        for target, base in sorted(packs):
            taken += self._pack(next(one for one in manifests if one.digest() == target), base)
        for one in manifests:
            for slab in one.slabs():
                if self._store.full_bytes(slab) is None:
                    raise BadRelease(one.name, f"slab {slab} is neither in the file nor in {self._store.where()}")
        return taken

    def _check_names(self, wanted: dict[str, SlabEntry], manifests: Sequence[Manifest]) -> None:
        names = set(map(object_name, wanted))
        digests = {one.digest() for one in manifests}
        for name in (*self._carried.names("objects"), *self._carried.names("packs")):
            pack = _PACK.fullmatch(name)
            if name not in names and not (pack and pack[1] in digests):
                raise BadRelease(name, "is part of no release in the file")

    def _object(self, slab: SlabEntry) -> bool:
        """A whole slab, if it is in the file. True where the store did not have it."""
        name = object_name(slab.id)
        data = self._carried.read(name)
        if data is None:
            return False
        if len(data) > max_object_bytes(slab.length):
            raise CorruptSlab(slab.id, f"its object has {len(data)} bytes")
        codec.decode_object(data, slab=slab.id, length=slab.length)
        if self._store.full_bytes(slab.id) is not None:
            if self._raw(slab) is not None:
                return False
            self._store.drop_full(slab.id)  # damaged here: that is mended
        return self._store.put_full(slab.id, data)

    def _pack(self, target: Manifest, base_digest: str) -> int:
        """What differs from a release that the store has. Returns how many slabs it brought."""
        base, digest = self._base(target, base_digest), target.digest()
        data = self._carried.read(index_name(digest, base_digest))
        if data is None or pack_name(digest, base_digest) not in self._carried.names("packs"):
            raise CorruptPack(base_digest, digest, "the pack or its index is not in the file")
        if len(data) > max_index_bytes(len(target.slabs())):
            raise CorruptPack(base_digest, digest, f"its index has {len(data)} bytes")
        index = parse_index(data, base=base, target=target)
        if index is None:
            raise CorruptPack(base_digest, digest, "its index has a later format than this version reads")
        with self._carried.entry(pack_name(digest, base_digest)) as file:
            taken = self._unpacked(index, file, target.slabs(), base.slabs())
        if self._store.index(digest, base_digest) != data:
            with self._store.new_pack(digest, base_digest) as out:
                for chunk in self._carried.chunks(pack_name(digest, base_digest)):
                    out.write(chunk)
            self._store.put_index(digest, base_digest, data)
        return taken

    def _unpacked(self, index: Index, file: IO[bytes], slabs: dict[str, SlabEntry], bases: dict[str, SlabEntry]) -> int:
        """Reads the pack once, checks each payload and puts the slabs that the store lacks."""
        tables = [_tables(index, one, file.read(one.length)) for one in index.tables]
        taken = 0
        for entry in index.entries:
            header, payload = entry.header, file.read(entry.header.payload_length)
            if payload_hash(payload) != header.payload_hash:
                raise CorruptPack(index.base, index.target, f"the payload of slab {header.slab} is damaged")
            if self._store.full_bytes(header.slab) is None:
                taken += self._put(entry, payload, self._raw(bases[header.base or ""]), tables, slabs[header.slab])
        if file.read(1):
            raise CorruptPack(index.base, index.target, "the pack goes on after its end")
        return taken

    def _put(self, entry: Entry, payload: bytes, base: bytes | None, tables: list[TableSet], slab: SlabEntry) -> bool:
        """False where it cannot be decoded: another form of it may follow."""
        table = tables[entry.header.tables] if entry.header.form == CTX else None
        try:
            raw = codec.decode(entry.header, payload, base=base, tables=table)
        except CorruptSlab:
            return False
        return self._store.put_full(slab.id, codec.encode_full(raw, slab.width, slab.mantissa).to_object())

    def _base(self, target: Manifest, digest: str) -> Manifest:
        for one in self._catalog.models().get(target.model, []):
            if self._catalog.is_here(one):
                manifest = self._catalog.manifest(one)
                if manifest.digest() == digest:
                    return manifest
        problem = f"it is a difference to a release that {self._store.where()} does not have: export it without --base"
        raise BadRelease(target.name, problem)

    def _raw(self, slab: SlabEntry) -> bytes | None:
        """From the store; None where that has no sound one."""
        data = self._store.full(slab.id)
        try:
            return None if data is None else codec.decode_object(data, slab=slab.id, length=slab.length)
        except CorruptSlab:
            return None


def _tables(index: Index, place: TableRange, data: bytes) -> TableSet:
    if payload_hash(data) != place.digest:
        raise CorruptPack(index.base, index.target, "a table set is damaged")
    return parse_tables(data)
