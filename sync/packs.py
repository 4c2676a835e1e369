"""All differences from one release to another: a pack (payloads, one after the other) and its index.

Owns the index's bytes (docs/formats/slab.md): written from what was streamed into a pack, and parsed with every check
that the format asks for. Nothing here proves anything, and which entry is taken is the reader's matter: the ids in the
signed manifest decide at last.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from common.errors import CorruptPack, CorruptSlab
from sync.codec import CTX, HEADER_BYTES, Encoded, Header, TableSet, parse_header, payload_hash

FORMAT: Final = 1
MAX_INDEX_BYTES: Final = 64 << 20
MAX_TABLE_SETS: Final = 256
MAX_TABLE_BYTES: Final = 65_536

_HEAD: Final = struct.Struct("<4sHHIQ32s32s")
_TABLES: Final = struct.Struct("<I16s")
_MAGIC: Final = b"OPIX"
_HASH_BYTES: Final = 16
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


class PackWriter:
    """Streams payloads into `file`; nothing but headers stays in memory.

    First forms of all slabs come before all second ones: whoever takes the first of each reads the pack in one range.
    """

    def __init__(
        self, file: BinaryIO, *, base: str, target: str, tables: Sequence[TableSet], folder: Path | None = None
    ) -> None:
        """`folder`: where second forms wait on the disk, if there are many."""
        self._file, self._base, self._target = file, base, target
        self._tables = [one.to_bytes() for one in tables]
        self._spare = tempfile.SpooledTemporaryFile(  # noqa: SIM115  # see __exit__
            max_size=_SPARE_BYTES, dir=None if folder is None else str(folder)
        )
        self._headers, self._spare_headers = bytearray(), bytearray()
        self._length = 0
        for data in self._tables:
            self._length += file.write(data)
        self._head_bytes = _HEAD.size + len(self._tables) * _TABLES.size + _HASH_BYTES

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._spare.close()

    def add(self, forms: Sequence[Encoded]) -> None:
        """One slab, the preferred form first. What an index has no room for is left out: it travels as `full`."""
        for rank, one in enumerate(forms):
            if self._head_bytes + len(self._headers) + len(self._spare_headers) + HEADER_BYTES > MAX_INDEX_BYTES:
                return
            headers, file = (self._spare_headers, self._spare) if rank else (self._headers, self._file)
            headers += one.header.to_bytes()
            file.write(one.payload)
            self._length += len(one.payload)

    def finish(self) -> bytes | None:
        """Completes the pack and returns its index; None when there is nothing in it."""
        if not self._headers:
            return None
        self._spare.seek(0)
        shutil.copyfileobj(self._spare, self._file)
        count = (len(self._headers) + len(self._spare_headers)) // HEADER_BYTES
        base, target = bytes.fromhex(self._base), bytes.fromhex(self._target)
        data = bytearray(_HEAD.pack(_MAGIC, FORMAT, len(self._tables), count, self._length, base, target))
        for one in self._tables:
            data += _TABLES.pack(len(one), payload_hash(one))
        data += self._headers + self._spare_headers
        return bytes(data) + payload_hash(bytes(data))


def max_index_bytes(slabs: int) -> int:
    """More than an index over `slabs` slabs has use for: what a reader accepts at most."""
    size = _HEAD.size + MAX_TABLE_SETS * _TABLES.size + 8 * slabs * HEADER_BYTES + _HASH_BYTES
    return min(size, MAX_INDEX_BYTES)


def parse_index(data: bytes, *, base: str, target: str) -> Index | None:
    """None for a later format. Raises `CorruptPack` for whatever does not hold."""
    if len(data) < _HEAD.size + _HASH_BYTES or len(data) > MAX_INDEX_BYTES:
        raise CorruptPack(base, target, f"index of {len(data)} bytes")
    magic, format_, tables, count, length, base_digest, target_digest = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptPack(base, target, "not an index")
    if format_ != FORMAT:
        return None
    view = memoryview(data)[:-_HASH_BYTES]
    if payload_hash(view) != data[-_HASH_BYTES:]:
        raise CorruptPack(base, target, "hash of the index does not match")
    if (base_digest.hex(), target_digest.hex()) != (base, target):
        raise CorruptPack(base, target, f"its index is from {base_digest.hex()} to {target_digest.hex()}")
    if tables > MAX_TABLE_SETS or len(view) != _HEAD.size + tables * _TABLES.size + count * HEADER_BYTES:
        raise CorruptPack(base, target, f"{tables} table sets and {count} entries in {len(data)} bytes")
    index = _index(view, base, target, tables)
    if problem := _problem(index, length):
        raise CorruptPack(base, target, problem)
    return index


def is_sound(index: Index, pack: BinaryIO) -> bool:
    """Every table set and payload is in `pack` as the index says; the payloads are not decoded."""
    parts = [(one.length, one.digest) for one in index.tables]
    parts += [(one.header.payload_length, one.header.payload_hash) for one in index.entries]
    return all(payload_hash(pack.read(length)) == digest for length, digest in parts) and not pack.read(1)


def _index(view: memoryview, base: str, target: str, tables: int) -> Index:
    ranges, at = [], 0
    for number in range(tables):
        length, digest = _TABLES.unpack_from(view, _HEAD.size + number * _TABLES.size)
        ranges.append(TableRange(offset=at, length=length, digest=digest))
        at += length
    entries = []
    for place in range(_HEAD.size + tables * _TABLES.size, len(view), HEADER_BYTES):
        try:
            header = parse_header(view, place)
        except CorruptSlab as exc:
            raise CorruptPack(base, target, f"an entry is malformed: {exc}") from exc
        entries.append(Entry(header=header, offset=at))
        at += header.payload_length
    return Index(base=base, target=target, tables=tuple(ranges), entries=tuple(entries))


def _problem(index: Index, pack_bytes: int) -> str | None:
    end = sum(one.length for one in index.tables) + sum(one.header.payload_length for one in index.entries)
    if end != pack_bytes:
        return f"its parts have {end} bytes, the pack {pack_bytes}"
    if not all(0 < one.length <= MAX_TABLE_BYTES for one in index.tables):
        return f"a table set has more than {MAX_TABLE_BYTES} bytes, or none"
    if any(one.header.form == CTX and one.header.tables >= len(index.tables) for one in index.entries):
        return "an entry names a table set that is not there"
    return None
