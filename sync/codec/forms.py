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

# A full object is mostly incompressible mantissas: level 1 is as small as any for int8 and fp16, and 3 % smaller than
# level 3 for bf16, which finds matches that are dearer than literals; fp32 gains .6 % from level 3.
_FULL_LEVELS: Final = {1: 1, 2: 1, 4: 3, 8: 3}
_DELTA_LEVELS: Final = (9, 1)  # the smaller one: where nearly all elements moved, it is level 1
_LIST_LEVEL, _SHORT_LIST = 19, 32 << 10  # 10 % smaller than level 9, and quick enough for so few bytes
_MAX_WINDOW: Final = 8 << 20
_SPARSE_HEAD: Final = struct.calcsize("<II")


def encode_full(raw: bytes, width: int, mantissa: int = 0) -> Encoded:
    return encoded(FULL, raw, None, width, mantissa, compress(to_planes(raw, width), _FULL_LEVELS[width], planes=width))


def encode_same(raw: bytes, width: int, mantissa: int) -> Encoded:
    return encoded(SAME, raw, slab_id(raw), width, mantissa, b"")


def encode_planes(raw: bytes, base: bytes, width: int, mantissa: int, *, base_id: str) -> Encoded:
    planes = kernels.planes_diff(raw, base, width, mantissa)
    payload = min((compress(planes, level, planes=width) for level in _DELTA_LEVELS), key=len)
    return encoded(PLANES, raw, base_id, width, mantissa, payload)


def encode_sparse(raw: bytes, base: bytes, width: int, mantissa: int, *, base_id: str) -> Encoded | None:
    """None where the list of differences would be longer than the slab."""
    content = kernels.sparse_gather(raw, base, width, mantissa)
    if content is None:
        return None
    level = _LIST_LEVEL if len(content) <= _SHORT_LIST else _DELTA_LEVELS[0]
    return encoded(SPARSE, raw, base_id, width, mantissa, compress(content, level))


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


def compress(data: bytes, level: int, *, planes: int = 1) -> bytes:
    """One frame. Each of equally long `planes` has blocks, and so Huffman tables, of its own."""
    coder = zstandard.ZstdCompressor(level=level, write_content_size=True).compressobj(size=len(data))
    view, plane = memoryview(data), len(data) // planes
    parts = []
    for start in range(0, (planes - 1) * plane, plane or 1):
        parts += [coder.compress(view[start : start + plane]), coder.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    parts += [coder.compress(view[(planes - 1) * plane :]), coder.flush()]
    return b"".join(parts)


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
