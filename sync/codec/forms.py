"""The forms that need nothing but zstd: `full`, `same`, `sparse`, `planes` (docs/formats/slab.md), encoded and decoded.

Encoders take `raw` and `base` of one length, a multiple of `width`. Decoders believe nothing: a frame has to declare
its size before it is unpacked, and errors are `ValueError`s that say what is wrong.
"""

from __future__ import annotations

import struct
from typing import Final

import zstandard

from sync.codec import kernels
from sync.codec.header import FULL, PLANES, SAME, SPARSE, Encoded, Header, payload_hash
from sync.codec.words import from_planes, to_planes
from sync.slabs import slab_id

FULL_LEVEL: Final = 3  # a full object is mostly incompressible mantissas: a higher level buys nothing
DELTA_LEVEL: Final = 9
_MAX_WINDOW: Final = 8 << 20
_SPARSE_HEAD: Final = struct.calcsize("<II")


def encode_full(raw: bytes, width: int, mantissa: int = 0) -> Encoded:
    return encoded(FULL, raw, None, width, mantissa, compress(to_planes(raw, width), FULL_LEVEL))


def encode_same(raw: bytes, width: int, mantissa: int) -> Encoded:
    return encoded(SAME, raw, slab_id(raw), width, mantissa, b"")


def encode_planes(raw: bytes, base: bytes, width: int, mantissa: int, *, base_id: str) -> Encoded:
    payload = compress(kernels.planes_diff(raw, base, width, mantissa), DELTA_LEVEL)
    return encoded(PLANES, raw, base_id, width, mantissa, payload)


def encode_sparse(raw: bytes, base: bytes, width: int, mantissa: int, *, base_id: str) -> Encoded | None:
    """None where the list of differences would be longer than the slab."""
    content = kernels.sparse_gather(raw, base, width, mantissa)
    if content is None:
        return None
    return encoded(SPARSE, raw, base_id, width, mantissa, compress(content, DELTA_LEVEL))


def decode_full(header: Header, payload: memoryview) -> bytes:
    return from_planes(decompress(payload, header.raw_length, header.raw_length), header.width)


def decode_planes(header: Header, payload: memoryview, base: bytes) -> bytes:
    planes = decompress(payload, header.raw_length, header.raw_length)
    return kernels.planes_undo(planes, base, header.width, header.mantissa)


def decode_sparse(header: Header, payload: memoryview, base: bytes) -> bytes:
    content = decompress(payload, _SPARSE_HEAD, header.raw_length + _SPARSE_HEAD)
    return kernels.sparse_apply(content, base, header.width, header.mantissa)


def encoded(
    form: int,
    raw: bytes,
    base: str | None,
    width: int,
    mantissa: int,
    payload: bytes,
    *,
    tables: int = 0,
    row: int = 0,
) -> Encoded:
    header = Header(
        form=form,
        width=width,
        mantissa=mantissa,
        tables=tables,
        row=row,
        raw_length=len(raw),
        payload_length=len(payload),
        slab=slab_id(raw),
        base=base,
        payload_hash=payload_hash(payload),
    )
    return Encoded(header=header, payload=payload)


def compress(data: bytes, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)


def decompress(payload: memoryview, low: int, high: int) -> bytes:
    """What the frame holds: it has to declare `low` to `high` bytes before anything is unpacked."""
    try:
        size = zstandard.get_frame_parameters(payload).content_size
        if not low <= size <= high:
            raise ValueError(f"compressed frame declares another length than {low}..{high} bytes")
        decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        data = decoder.decompress(payload, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise ValueError(f"compressed frame is damaged: {exc}") from exc
    if len(data) != size:
        raise ValueError("compressed frame is short")
    return data
