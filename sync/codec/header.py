"""What an object says about itself: the 88-byte header of docs/formats/slab.md, written and checked."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from common.errors import CorruptSlab
from sync.slabs import MAX_SLAB_BYTES

FULL, SAME, SPARSE, PLANES, CTX = 1, 2, 3, 4, 5
FORM_NAMES: Final = {FULL: "full", SAME: "same", SPARSE: "sparse", PLANES: "planes", CTX: "ctx"}
KINDS: Final = frozenset({(1, 0), (1, 2), (1, 3), (2, 0), (2, 7), (2, 10), (4, 0), (4, 23), (8, 0), (8, 52)})
CTX_KINDS: Final = frozenset({(1, 0), (1, 2), (1, 3), (2, 7), (2, 10), (4, 23)})
OBJECT_FORMAT: Final = 1

HASH_BYTES: Final = 8
_HEADER: Final = struct.Struct(f"<BBBBIII32s32s{HASH_BYTES}s")
HEADER_BYTES: Final = _HEADER.size
_OBJECT: Final = struct.Struct("<4sI")
OBJECT_HEADER_BYTES: Final = _OBJECT.size + HEADER_BYTES
_MAGIC: Final = b"OSLB"
_NO_BASE: Final = bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Not to be believed before `decode` has proven it. `slab` and `base` are ids in hex; a form that is not in
    `FORM_NAMES` comes from a later version: its other fields may mean something else."""

    form: int
    width: int
    mantissa: int
    raw_length: int
    payload_length: int
    slab: str
    base: str | None
    payload_hash: bytes
    tables: int = 0
    row: int = 0

    @property
    def form_name(self) -> str:
        return FORM_NAMES.get(self.form, f"form {self.form}")

    def to_bytes(self) -> bytes:
        base = _NO_BASE if self.base is None else bytes.fromhex(self.base)
        return _HEADER.pack(
            self.form,
            self.width,
            self.mantissa,
            self.tables,
            self.row,
            self.raw_length,
            self.payload_length,
            bytes.fromhex(self.slab),
            base,
            self.payload_hash,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A slab in one form."""

    header: Header
    payload: bytes

    def to_object(self) -> bytes:
        """A slab that stands alone."""
        return _OBJECT.pack(_MAGIC, OBJECT_FORMAT) + self.header.to_bytes() + self.payload


def payload_hash(payload: bytes | memoryview) -> bytes:
    return blake3(payload).digest(HASH_BYTES)


def max_payload_bytes(raw_length: int) -> int:
    """The longest payload that a slab of `raw_length` bytes may have (above zstd's bound for incompressible data)."""
    return raw_length + (raw_length >> 7) + 1024


def max_object_bytes(raw_length: int) -> int:
    return OBJECT_HEADER_BYTES + max_payload_bytes(raw_length)


def parse_header(data: bytes | memoryview, at: int = 0) -> Header:
    """Checks everything that a header alone can show. Raises `CorruptSlab`."""
    if len(data) - at < HEADER_BYTES:
        raise CorruptSlab("?", f"header of {len(data) - at} bytes, it has {HEADER_BYTES}")
    form, width, mantissa, tables, row, raw_length, payload_length, slab, base, digest = _HEADER.unpack_from(data, at)
    header = Header(
        form=form,
        width=width,
        mantissa=mantissa,
        tables=tables,
        row=row,
        raw_length=raw_length,
        payload_length=payload_length,
        slab=slab.hex(),
        base=None if base == _NO_BASE else base.hex(),
        payload_hash=digest,
    )
    if problem := header_problem(header):
        raise CorruptSlab(header.slab, problem)
    return header


def parse_object(data: bytes) -> tuple[Header, memoryview]:
    """Header and payload of a slab that stands alone. Raises `CorruptSlab`."""
    if len(data) < OBJECT_HEADER_BYTES or _OBJECT.unpack_from(data) != (_MAGIC, OBJECT_FORMAT):
        raise CorruptSlab("?", f"not a slab object of format {OBJECT_FORMAT}")
    header = parse_header(data, _OBJECT.size)
    if header.form != FULL:
        raise CorruptSlab(header.slab, f"stands alone as {header.form_name}, which needs other slabs")
    return header, memoryview(data)[OBJECT_HEADER_BYTES:]


def header_problem(header: Header) -> str | None:
    """What a header alone can show to be wrong."""
    if header.form not in FORM_NAMES:
        return None
    kind = (header.width, header.mantissa)
    if kind not in KINDS or (header.form == CTX and kind not in CTX_KINDS):
        return f"elements of width {header.width} with {header.mantissa} mantissa bits have no {header.form_name} form"
    if not 0 < header.raw_length <= MAX_SLAB_BYTES or header.raw_length % header.width:
        return f"raw length {header.raw_length} is not a multiple of {header.width} within 1..{MAX_SLAB_BYTES}"
    if header.payload_length > max_payload_bytes(header.raw_length):
        return f"payload of {header.payload_length} bytes for {header.raw_length} raw ones"
    if (header.form == SAME) != (header.payload_length == 0):
        return f"payload of {header.payload_length} bytes in form {header.form_name}"
    if (header.form == FULL) != (header.base is None) or (header.form == SAME and header.base != header.slab):
        return f"base {header.base} in form {header.form_name}"
    if (
        (header.form == CTX) != (header.row > 0)
        or header.row > MAX_SLAB_BYTES
        or (header.form != CTX and header.tables)
    ):
        return f"rows of {header.row} elements with table set {header.tables} in form {header.form_name}"
    return None
