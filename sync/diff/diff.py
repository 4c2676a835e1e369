"""What a node that has one file must fetch to have another: encoded as a publisher does it, counted by tensor.

The pack, its index and the manifest are those of a release (docs/formats/slab.md). With a store they are written there,
with the slabs that travel whole: all that `rebuild` needs beside the base. Memory is constant but for the sample that
the table sets are trained on.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sync import codec
from sync.codec.choice import Pair
from sync.deltas import Change, write_pack
from sync.diff.file_release import FileRelease
from sync.diff.tensors import SlabCost, TensorCost, tensor_costs
from sync.manifests import pack, packed_name
from sync.packs import Index, parse_index
from sync.release import SlabEntry, manifest_path, to_bytes
from sync.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All bytes that a node with the base fetches, and the limit of a plain model (sync/diff/limit.py)."""

    raw_bytes: int
    forms: Mapping[str, int]  # payload by form; slabs that travel whole with their object's header
    table_bytes: int
    index_bytes: int
    manifest_bytes: int
    bound_bytes: int
    tensors: tuple[TensorCost, ...]

    @property
    def payload_bytes(self) -> int:
        return sum(self.forms.values())

    @property
    def wire_bytes(self) -> int:
        return self.payload_bytes + self.table_bytes + self.index_bytes + self.manifest_bytes


def diff(base: FileRelease, new: FileRelease, *, store: Store | None = None) -> Report:
    """Raises `FileChanged`, and `OSError` where a file cannot be read or the store cannot be written."""
    places = _Places(base, new)
    index_bytes, index = _pack(places, store)
    costs = _costs(places, index, store)
    manifest = pack(to_bytes(new.manifest), to_bytes(base.manifest))
    if store is not None:
        store.replace(manifest_name(base, new), manifest)
    forms = Counter(dict.fromkeys(codec.FORM_NAMES.values(), 0))
    for cost in costs.values():
        forms[cost.form] += cost.bytes
    tables = {cost.tables for cost in costs.values() if cost.form == "ctx"}
    tensors = tensor_costs(base, new, costs)
    return Report(
        raw_bytes=new.layout.size,
        forms=dict(forms),
        table_bytes=0 if index is None else sum(index.tables[number].length for number in tables),
        index_bytes=index_bytes,
        manifest_bytes=len(manifest),
        bound_bytes=math.ceil(sum(one.bound_bytes for one in tensors)),
        tensors=tensors,
    )


def manifest_name(base: FileRelease, new: FileRelease) -> str:
    """Of the new manifest as it travels to whoever has that of the base."""
    name = "targets/" + manifest_path(new.manifest.model, new.manifest.version)
    return packed_name(name, to_bytes(base.manifest))


class _Places:
    """The slabs that the base does not have, each once, and what the base has at their places."""

    def __init__(self, base: FileRelease, new: FileRelease) -> None:
        self.base, self.new = base, new
        known = base.manifest.slabs()
        before = {slab.key: slab for slab in base.slabs}
        self.missing = {slab.id: number for number, slab in reversed([*enumerate(new.slabs)]) if slab.id not in known}
        self._pairs: list[tuple[int, SlabEntry]] = []
        for number in sorted(self.missing.values()):
            old, slab = before.get(new.slabs[number].key), new.slabs[number]
            if old is not None and _kind(old) == _kind(slab):
                self._pairs.append((number, old))
        self._full_bytes: dict[str, int] = {}

    def changes(self) -> Iterator[Change]:
        for number, old in self._pairs:
            slab, raw = self.new.slabs[number], self.new.read(self.new.slabs[number])
            if slab.id not in self._full_bytes:
                self._full_bytes[slab.id] = len(self.full(slab, raw))
            pair = Pair(
                raw=raw,
                base=self.base.read(old),
                base_id=old.id,
                width=slab.width,
                mantissa=slab.mantissa,
                row=self.new.cuts[number].row,
            )
            yield Change(pair=pair, full_bytes=self._full_bytes[slab.id])

    def full(self, slab: SlabEntry, raw: bytes | None = None) -> bytes:
        raw = self.new.read(slab) if raw is None else raw
        return codec.encode_full(raw, slab.width, slab.mantissa).to_object()


def _kind(slab: SlabEntry) -> tuple[int, int, int]:
    return slab.length, slab.width, slab.mantissa


def _pack(places: _Places, store: Store | None) -> tuple[int, Index | None]:
    """Writes the pack (nowhere, without a store), and what its index is."""
    base, target = places.base.manifest, places.new.manifest
    digests = target.digest(), base.digest()

    def write(file: BinaryIO, folder: Path | None) -> bytes | None:
        return write_pack(file, places.changes, base=base, target=target, folder=folder)

    if store is None:
        with Path(os.devnull).open("wb") as nowhere:
            data = write(nowhere, None)
    else:
        with store.new_pack(*digests) as file:
            data = write(file, Path(file.name).parent)
        if data is None:
            store.drop_pack(*digests)
        else:
            store.put_index(*digests, data)
    return (0, None) if data is None else (len(data), parse_index(data, base=base, target=target))


def _costs(places: _Places, index: Index | None, store: Store | None) -> dict[str, SlabCost]:
    """By slab: its smallest form in the pack, or itself, which goes into the store."""
    costs: dict[str, SlabCost] = {}
    for entry in () if index is None else index.entries:
        one = SlabCost(form=entry.header.form_name, bytes=entry.header.payload_length, tables=entry.header.tables)
        if one.bytes < costs.get(entry.header.slab, one).bytes or entry.header.slab not in costs:
            costs[entry.header.slab] = one
    for slab, number in places.missing.items():
        if slab not in costs:
            data = places.full(places.new.slabs[number])
            costs[slab] = SlabCost(form="full", bytes=len(data))
            if store is not None:
                store.put_full(slab, data)
    return costs
