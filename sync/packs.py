"""All differences from one release to another: a pack (payloads, one after the other) and its index.

Owns the index's bytes (docs/formats/slab.md): written from what was streamed into a pack, and parsed with every check
that the format asks for. An index names slabs by their numbers in the two manifests, which whoever reads it has.
Nothing here proves anything, and which entry is taken is the reader's matter: the ids in the signed manifest decide.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import numpy as np
from blake3 import blake3

from common.errors import CorruptPack
from sync.codec import CTX, HASH_BYTES, Encoded, Header, TableSet, header_problem, payload_hash
from sync.codec.forms import compress, decompress
from sync.codec.words import from_planes, to_planes
from sync.release import Manifest, SlabEntry

FORMAT: Final = 1
MAX_INDEX_BYTES: Final = 64 << 20  # also of its entries, unpacked
MAX_TABLE_SETS: Final = 256
MAX_TABLE_BYTES: Final = 65_536
MAX_FORMS: Final = 8  # entries for each slab of the target, on average: more than any writer has use for

_HEAD: Final = struct.Struct(f"<4sHHIQ32s32s{HASH_BYTES}s")
_TABLES: Final = struct.Struct(f"<I{HASH_BYTES}s")
_MAGIC: Final = b"OPIX"
_ENTRY: Final = np.dtype(
    [
        ("slab", "<u4"),  # number in the target less that of the entry before, less 1
        ("base", "<u4"),  # number in the base less that of the slab
        ("row", "<u4"),
        ("payload_length", "<u4"),
        ("form", "u1"),
        ("tables", "u1"),
        ("payload_hash", "u1", HASH_BYTES),
    ]
)
_PACKED: Final = struct.Struct(f"<IIIIBB{HASH_BYTES}s")
_LEVEL: Final = 19
_SPARE_BYTES: Final = 1 << 20  # of second forms, kept in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRange:
    """Where a table set is in the pack."""

    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A slab in one form, and where its payload is in the pack."""

    header: Header
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    base: str  # digest of the release that the pack is a difference to
    target: str
    tables: tuple[TableRange, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFile:
    """An index as it is read without the manifests: which slabs its entries speak of are numbers, `slab` in the
    target's and `base` in the base's."""

    base: str
    target: str
    numbering: bytes
    tables: tuple[TableRange, ...]
    entries: np.ndarray[Any, Any]  # structured: slab, base, row, payload_length, form, tables, payload_hash
    pack_bytes: int


class PackWriter:
    """Streams payloads into `file`; nothing but the index's entries stays in memory.

    First forms of all slabs come before all second ones: whoever takes the first of each reads the pack in one range.
    """

    def __init__(
        self,
        file: BinaryIO,
        *,
        base: Manifest,
        target: Manifest,
        tables: Sequence[TableSet],
        folder: Path | None = None,
    ) -> None:
        """`folder`: where second forms wait on the disk, if there are many."""
        self._file, self._base, self._target = file, base, target
        self._slabs = target.slabs()
        self._numbers = [{slab: number for number, slab in enumerate(one)} for one in (self._slabs, base.slabs())]
        self._most = _max_entries(len(self._slabs))
        self._tables = [one.to_bytes() for one in tables]
        self._spare = tempfile.SpooledTemporaryFile(  # noqa: SIM115  # see __exit__
            max_size=_SPARE_BYTES, dir=None if folder is None else str(folder)
        )
        self._first, self._second = bytearray(), bytearray()  # entries, with the numbers themselves
        self._length = 0
        for data in self._tables:
            self._length += file.write(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._spare.close()

    def add(self, forms: Sequence[Encoded]) -> None:
        """One slab of the target, the preferred form first; its base is in the base release. What an index cannot say
        (no room, elements of another kind than in the manifest) is left out: it travels as `full`."""
        for rank, one in enumerate(forms):
            slab = self._slabs[one.header.slab]
            if (slab.width, slab.mantissa) != (one.header.width, one.header.mantissa):
                return
            if len(self._first) + len(self._second) >= self._most * _ENTRY.itemsize:
                return
            entries, file = (self._second, self._spare) if rank else (self._first, self._file)
            entries += self._entry(one.header)
            file.write(one.payload)
            self._length += len(one.payload)

    def finish(self) -> bytes | None:
        """Completes the pack and returns its index; None when there is nothing in it."""
        if not self._first:
            return None
        self._spare.seek(0)
        shutil.copyfileobj(self._spare, self._file)
        entries = np.frombuffer(self._first + self._second, _ENTRY).copy()
        entries["base"] -= entries["slab"]
        entries["slab"][1:] -= entries["slab"][:-1] + np.uint32(1)
        base, target = (bytes.fromhex(one.digest()) for one in (self._base, self._target))
        numbering = _numbering(self._base, self._target)
        count = len(entries)
        data = bytearray(_HEAD.pack(_MAGIC, FORMAT, len(self._tables), count, self._length, base, target, numbering))
        for one in self._tables:
            data += _TABLES.pack(len(one), payload_hash(one))
        data += compress(to_planes(entries.tobytes(), _ENTRY.itemsize), _LEVEL)
        return bytes(data) + payload_hash(bytes(data))

    def _entry(self, header: Header) -> bytes:
        slab, base = self._numbers[0][header.slab], self._numbers[1][header.base or ""]
        row, length, form, tables = header.row, header.payload_length, header.form, header.tables
        return _PACKED.pack(slab, base, row, length, form, tables, header.payload_hash)


def max_index_bytes(slabs: int) -> int:
    """More than an index to a release of `slabs` slabs has use for: what a reader accepts at most."""
    entries = _max_entries(slabs) * _ENTRY.itemsize
    return min(_HEAD.size + MAX_TABLE_SETS * _TABLES.size + entries + (entries >> 7) + 1024, MAX_INDEX_BYTES)


def parse_index(data: bytes, *, base: Manifest, target: Manifest) -> Index | None:
    """None for a later format. Raises `CorruptPack` for whatever does not hold, `base` and `target` being other
    releases than those that it was made for included."""
    found = read_index(data, base=base.digest(), target=target.digest())
    if found is None:
        return None
    if found.numbering != _numbering(base, target):
        raise CorruptPack(found.base, found.target, "its index numbers the slabs of other manifests")
    slabs, bases = tuple(target.slabs().values()), tuple(base.slabs().values())
    if len(found.entries) > _max_entries(len(slabs)):
        raise CorruptPack(found.base, found.target, f"{len(found.entries)} entries for {len(slabs)} slabs")
    entries, at = [], sum(one.length for one in found.tables)
    for one in found.entries:
        header = _header(found, one, slabs, bases)
        entries.append(Entry(header=header, offset=at))
        at += header.payload_length
    return Index(base=found.base, target=found.target, tables=found.tables, entries=tuple(entries))


def read_index(data: bytes, *, base: str, target: str) -> IndexFile | None:
    """What an index says by itself, of the releases with these digests. None for a later format. `CorruptPack`."""
    if len(data) < _HEAD.size + HASH_BYTES or len(data) > MAX_INDEX_BYTES:
        raise CorruptPack(base, target, f"index of {len(data)} bytes")
    magic, format_, sets, count, length, base_digest, target_digest, numbering = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptPack(base, target, "not an index")
    if format_ != FORMAT:
        return None
    view = memoryview(data)[:-HASH_BYTES]
    if payload_hash(view) != data[-HASH_BYTES:]:
        raise CorruptPack(base, target, "hash of the index does not match")
    if (base_digest.hex(), target_digest.hex()) != (base, target):
        raise CorruptPack(base, target, f"its index is from {base_digest.hex()} to {target_digest.hex()}")
    body = _HEAD.size + sets * _TABLES.size
    if sets > MAX_TABLE_SETS or body > len(view) or count * _ENTRY.itemsize > MAX_INDEX_BYTES:
        raise CorruptPack(base, target, f"{sets} table sets and {count} entries in {len(data)} bytes")
    try:
        entries = _entries(view[body:], count)
    except ValueError as exc:
        raise CorruptPack(base, target, f"its entries: {exc}") from exc
    tables = _ranges(view, sets)
    found = IndexFile(base=base, target=target, numbering=numbering, tables=tables, entries=entries, pack_bytes=length)
    problem = _problem(found)
    if problem is not None:
        raise CorruptPack(base, target, problem)
    return found


def is_sound(index: Index, pack: BinaryIO) -> bool:
    """Every table set and payload is in `pack` as the index says; the payloads are not decoded."""
    parts = [(one.length, one.digest) for one in index.tables]
    parts += [(one.header.payload_length, one.header.payload_hash) for one in index.entries]
    return all(payload_hash(pack.read(length)) == digest for length, digest in parts) and not pack.read(1)


def _max_entries(slabs: int) -> int:
    return min(MAX_FORMS * slabs, MAX_INDEX_BYTES // _ENTRY.itemsize)


def _numbering(base: Manifest, target: Manifest) -> bytes:
    """Of the slabs that numbers speak of: the same release cut by another version has others."""
    hasher = blake3()
    for one in (base, target):
        for slab in one.slabs():
            hasher.update(bytes.fromhex(slab))
    return hasher.digest(HASH_BYTES)


def _ranges(view: memoryview, sets: int) -> tuple[TableRange, ...]:
    ranges, at = [], 0
    for number in range(sets):
        length, digest = _TABLES.unpack_from(view, _HEAD.size + number * _TABLES.size)
        ranges.append(TableRange(offset=at, length=length, digest=digest))
        at += length
    return tuple(ranges)


def _entries(body: memoryview, count: int) -> np.ndarray[Any, Any]:
    """With the numbers themselves in `slab` and `base`. Raises `ValueError`."""
    size = count * _ENTRY.itemsize
    entries = np.frombuffer(from_planes(decompress(body, size, size), _ENTRY.itemsize), _ENTRY).copy()
    entries["slab"] = np.cumsum(entries["slab"] + np.uint32(1), dtype=np.uint32) - np.uint32(1)
    entries["base"] += entries["slab"]
    return entries


def _problem(found: IndexFile) -> str | None:
    end = sum(one.length for one in found.tables) + int(found.entries["payload_length"].sum(dtype=np.uint64))
    if end != found.pack_bytes:
        return f"its parts have {end} bytes, the pack {found.pack_bytes}"
    if not all(0 < one.length <= MAX_TABLE_BYTES for one in found.tables):
        return f"a table set has more than {MAX_TABLE_BYTES} bytes, or none"
    if bool(np.any(found.entries["tables"][found.entries["form"] == CTX] >= len(found.tables))):
        return "an entry names a table set that is not there"
    return None


def _header(found: IndexFile, one: np.void, slabs: Sequence[SlabEntry], bases: Sequence[SlabEntry]) -> Header:
    number, base_number = int(one["slab"]), int(one["base"])
    if number >= len(slabs) or base_number >= len(bases):
        numbers = f"slab {number} of {len(slabs)}, and of {base_number} of {len(bases)} in the base"
        raise CorruptPack(found.base, found.target, f"an entry speaks of {numbers}")
    slab, base = slabs[number], bases[base_number]
    header = Header(
        form=int(one["form"]),
        width=slab.width,
        mantissa=slab.mantissa,
        tables=int(one["tables"]),
        row=int(one["row"]),
        raw_length=slab.length,
        payload_length=int(one["payload_length"]),
        slab=slab.id,
        base=base.id,
        payload_hash=one["payload_hash"].tobytes(),
    )
    problem = header_problem(header)
    if problem is None and base.length != slab.length:
        problem = f"its base has {base.length} bytes"
    if problem is not None:
        raise CorruptPack(found.base, found.target, f"an entry is malformed: slab {slab.id}: {problem}")
    return header
