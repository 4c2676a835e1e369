"""Where the members of a zip archive lie: its directory is read, nothing is unpacked.

Read here rather than by `zipfile`, which takes a whole directory of any size into memory. Knows zip64 (checkpoints over
4 GB). Encrypted members and archives in several parts or with a comment are not what checkpoints are: `Malformed`.
Source: PKWARE's APPNOTE, 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from sync.containers.layout import MAX_TENSORS, Malformed
from sync.containers.source import Cursor, Source

MAGIC: Final = b"PK\x03\x04"

_END: Final = struct.Struct("<4s4H2LH")  # signature, disks 2, entries 2, bytes and offset of the directory, comment
_LOCATOR: Final = struct.Struct("<4sLQL")  # signature, disk, offset of the zip64 end, disks
_END64: Final = struct.Struct("<4sQ2H2L4Q")  # ..., disks 2, entries 2, bytes and offset of the directory
_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_EXTRA: Final = struct.Struct("<2H")
_ZIP64_FIELD: Final = 1
_IN_ZIP64: Final = 0xFFFFFFFF
_ENCRYPTED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    name: str
    is_stored: bool  # as it is, not compressed
    header: int  # where its local header is
    length: int  # bytes in the archive


def members(source: Source) -> list[Member]:
    """In the order of the directory."""
    count, start = _directory(source)
    if count > MAX_TENSORS:
        raise Malformed
    cursor = Cursor(source, start)
    return [_member(cursor) for _ in range(count)]


def data_offset(source: Source, member: Member) -> int:
    """Behind the local header, whose name and padding may be of other lengths than the directory's."""
    signature, *_, name, extra = _LOCAL.unpack(source.fetch(member.header, _LOCAL.size))
    if signature != MAGIC:
        raise Malformed
    return member.header + _LOCAL.size + int(name) + int(extra)


def _directory(source: Source) -> tuple[int, int]:
    """(number of entries, offset of the first)."""
    at = source.size - _END.size
    if at < 0:
        raise Malformed
    signature, _, _, _, count, _, start, comment = _END.unpack(source.fetch(at, _END.size))
    if signature != b"PK\x05\x06" or comment:
        raise Malformed
    if start == _IN_ZIP64 or count == 0xFFFF:
        magic, _, offset, _ = _LOCATOR.unpack(source.fetch(max(0, at - _LOCATOR.size), _LOCATOR.size))
        if magic != b"PK\x06\x07":
            raise Malformed
        magic, *_, count, _, start = _END64.unpack(source.fetch(offset, _END64.size))
        if magic != b"PK\x06\x06":
            raise Malformed
    return count, start


def _member(cursor: Cursor) -> Member:
    entry = cursor.unpack(_ENTRY)
    signature, flags, method = entry[0], entry[3], entry[4]
    packed, size, name_bytes, extra_bytes, comment_bytes, header = *entry[8:13], entry[16]
    if signature != b"PK\x01\x02" or flags & _ENCRYPTED:
        raise Malformed
    name = cursor.take(name_bytes).decode("utf-8", "replace")
    extra = cursor.take(extra_bytes)
    cursor.skip(comment_bytes)
    wide = _zip64_values(extra)
    size, packed, header = (wide.pop(0) if n == _IN_ZIP64 and wide else n for n in (size, packed, header))
    is_stored = method == 0 and packed == size
    return Member(name=name, is_stored=is_stored, header=header, length=packed)


def _zip64_values(extra: bytes) -> list[int]:
    """The 64-bit numbers that stand, in this order, for those of size, packed size and offset that are full of ones."""
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, length = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _ZIP64_FIELD:
            return [int.from_bytes(extra[i : i + 8], "little") for i in range(at, min(at + length, len(extra)) - 7, 8)]
        at += length
    return []
