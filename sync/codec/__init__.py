"""How a slab is stored and travels: five forms, bit-exact (docs/formats/slab.md).

`decode` is the only way back: payload hash before parsing, output never beyond the declared length, the slab's id at
the end. What encodes is `forms` (each slab for itself), `model` and `ctx` (table sets over many slabs) and `choice`.
"""

from __future__ import annotations

from common.errors import CorruptSlab
from sync.codec import ctx, forms
from sync.codec.forms import encode_full, encode_planes, encode_same, encode_sparse
from sync.codec.header import (
    CTX,
    CTX_KINDS,
    FORM_NAMES,
    FULL,
    HASH_BYTES,
    HEADER_BYTES,
    KINDS,
    PLANES,
    SAME,
    SPARSE,
    Encoded,
    Header,
    header_problem,
    max_object_bytes,
    max_payload_bytes,
    parse_header,
    parse_object,
    payload_hash,
)
from sync.codec.tables import TableSet, parse_tables
from sync.slabs import slab_id

__all__ = [
    "CTX",
    "CTX_KINDS",
    "FORM_NAMES",
    "FULL",
    "HASH_BYTES",
    "HEADER_BYTES",
    "KINDS",
    "PLANES",
    "SAME",
    "SPARSE",
    "Encoded",
    "Header",
    "TableSet",
    "decode",
    "decode_object",
    "encode_full",
    "encode_planes",
    "encode_same",
    "encode_sparse",
    "header_problem",
    "max_object_bytes",
    "max_payload_bytes",
    "parse_header",
    "parse_object",
    "parse_tables",
    "payload_hash",
]


def decode(
    header: Header, payload: bytes | memoryview, *, base: bytes | None = None, tables: TableSet | None = None
) -> bytes:
    """The raw bytes of slab `header.slab`. `base` is needed for all forms but `full`, `tables` for `ctx`.

    Raises `CorruptSlab` for whatever does not hold, a missing base or an unknown form included.
    """
    view = memoryview(payload)
    if len(view) != header.payload_length or payload_hash(view) != header.payload_hash:
        raise CorruptSlab(header.slab, "payload hash does not match")
    if header.form != FULL and (base is None or len(base) != header.raw_length):
        raise CorruptSlab(header.slab, f"its base {header.base} is not here")
    try:
        raw = _raw(header, view, base or b"", tables)
    except ValueError as exc:
        raise CorruptSlab(header.slab, str(exc)) from exc
    if slab_id(raw) != header.slab:
        raise CorruptSlab(header.slab, "decoded bytes do not have the slab's id")
    return raw


def decode_object(data: bytes, *, slab: str, length: int) -> bytes:
    """The raw bytes of `slab`, which has `length` bytes, from an object that stands alone. Raises `CorruptSlab`."""
    header, payload = parse_object(data)
    if header.slab != slab or header.raw_length != length:
        raise CorruptSlab(slab, f"the object is of slab {header.slab} with {header.raw_length} bytes, not {length}")
    return decode(header, payload)


def _raw(header: Header, payload: memoryview, base: bytes, tables: TableSet | None) -> bytes:
    if header.form == FULL:
        return forms.decode_full(header, payload)
    if header.form == SAME:
        return base
    if header.form == SPARSE:
        return forms.decode_sparse(header, payload, base)
    if header.form == PLANES:
        return forms.decode_planes(header, payload, base)
    if header.form == CTX:
        if tables is None:
            raise ValueError(f"its table set {header.tables} is not here")
        return ctx.decode(header, payload, base, tables)
    raise ValueError(f"{header.form_name} is not known here")
