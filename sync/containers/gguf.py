"""GGUF, versions 2 and 3, little-endian: header, metadata, one info per tensor, then the data at an alignment.

Block-quantized types keep their name and their logical shape, and travel as bytes. A type that this table does not know
(a later one) reaches to the next tensor. The metadata is walked, not kept: only `general.alignment` matters here.
Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sync.containers.kinds import KINDS
from sync.containers.layout import MAX_TENSORS, Malformed, Tensor, declared, length_of
from sync.containers.source import Cursor, Source

MAGIC: Final = b"GGUF"

_TYPES: Final = {
    0: "float32", 1: "float16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k",
    11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs",
    19: "iq1_s", 20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "int8", 25: "int16", 26: "int32",
    27: "int64", 28: "float64", 29: "iq1_m", 30: "bfloat16", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4",
}  # fmt: skip
_VALUE_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _U32_VALUE = 8, 9, 4
_MAX_DEPTH: Final = 4  # of arrays in arrays
_MAX_DIMS: Final = 8  # ggml itself has 4
_MAX_KEY: Final = 65535
_MAX_ALIGNMENT: Final = 1 << 20

_HEADER: Final = struct.Struct("<4sIQQ")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_TYPE_AND_OFFSET: Final = struct.Struct("<IQ")
_ARRAY_HEADER: Final = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Info:
    name: str
    shape: tuple[int, ...]
    dtype: str | None
    offset: int  # from the start of the data


def find_tensors(source: Source) -> Iterator[Tensor]:
    cursor = Cursor(source)
    magic, version, count, keys = cursor.unpack(_HEADER)
    if magic != MAGIC or version not in (2, 3) or count > MAX_TENSORS:
        raise Malformed
    alignment = _alignment(cursor, keys)
    infos = [_info(cursor) for _ in range(count)]
    start = -(-cursor.at // alignment) * alignment
    offsets = sorted({info.offset for info in infos})
    after = dict(itertools.pairwise([*offsets, source.size - start]))
    for info in infos:
        room = after[info.offset] - info.offset
        if room < 0:
            raise Malformed
        length = None if info.dtype is None else _length(info.dtype, info.shape, room)
        yield declared(info.name, info.dtype, info.shape, start + info.offset, room if length is None else length)


def _length(dtype: str, shape: tuple[int, ...], room: int) -> int | None:
    """None where it is unknown: a row that is not whole blocks is nothing that ggml writes."""
    if shape and shape[-1] % KINDS[dtype].block:
        return None
    return length_of(dtype, shape, room)


def _alignment(cursor: Cursor, keys: int) -> int:
    """Walks the metadata; each of the `keys` costs at least 13 bytes, so the file's end bounds the loop."""
    alignment = 32
    for _ in range(keys):
        key = _text(cursor)
        (kind,) = cursor.unpack(_U32)
        if key == "general.alignment" and kind == _U32_VALUE:
            (alignment,) = cursor.unpack(_U32)
        else:
            _skip_value(cursor, kind, 0)
    if not 0 < alignment <= _MAX_ALIGNMENT:
        raise Malformed
    return alignment


def _skip_value(cursor: Cursor, kind: int, depth: int) -> None:
    if kind in _VALUE_BYTES:
        cursor.skip(_VALUE_BYTES[kind])
    elif kind == _STRING:
        cursor.skip(*cursor.unpack(_U64))
    elif kind == _ARRAY and depth < _MAX_DEPTH:
        inner, count = cursor.unpack(_ARRAY_HEADER)
        if inner in _VALUE_BYTES:
            cursor.skip(count * _VALUE_BYTES[inner])
        else:
            for _ in range(count):
                _skip_value(cursor, inner, depth + 1)
    else:
        raise Malformed


def _info(cursor: Cursor) -> _Info:
    name = _text(cursor)
    (dims,) = cursor.unpack(_U32)
    if dims > _MAX_DIMS:
        raise Malformed
    shape = cursor.unpack(struct.Struct(f"<{dims}Q"))[::-1]  # the file names the fastest dimension first
    kind, offset = cursor.unpack(_TYPE_AND_OFFSET)
    return _Info(name=name, shape=shape, dtype=_TYPES.get(kind), offset=offset)


def _text(cursor: Cursor) -> str:
    (length,) = cursor.unpack(_U64)
    if length > _MAX_KEY:
        raise Malformed
    return cursor.take(length).decode("utf-8", "replace")
