"""Where the parameters lie in a file: ONNX (raw_data of the graph's initializers), safetensors, or one plain tensor.

Nothing is decoded and nothing is moved: a `Layout` only says which byte ranges of a file belong to which tensor. What
lies between them is the file's skeleton, so putting skeleton and tensors back at their offsets gives the same bytes.
A file that is not what its name promises (truncated, overlapping, hostile) is laid out as one plain tensor.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MAX_TENSORS: Final = 1 << 18
MAX_HEADER_BYTES: Final = 100 << 20  # the limit that the safetensors format sets itself
MAX_NAME: Final = 512

# name -> (bytes per element, is a floating-point bit pattern). What is not listed travels as plain bytes.
DTYPES: Final = {
    "float64": (8, True), "float32": (4, True), "float16": (2, True), "bfloat16": (2, True),
    "int64": (8, False), "int32": (4, False), "int16": (2, False), "int8": (1, False),
    "uint64": (8, False), "uint32": (4, False), "uint16": (2, False), "uint8": (1, False), "bool": (1, False),
}  # fmt: skip
_ONNX_TYPES: Final = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16",
}  # fmt: skip
_SAFETENSORS_TYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor's bytes in a file: `length` bytes at `offset`, C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int

    @property
    def width(self) -> int:
        """Bytes per element."""
        return DTYPES[self.dtype][0]

    @property
    def is_float(self) -> bool:
        return DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A file's tensors, in order of position and without overlap."""

    size: int
    container: str  # onnx | safetensors | plain
    tensors: tuple[Tensor, ...]

    def skeleton(self) -> tuple[tuple[int, int], ...]:
        """The byte ranges (offset, length) that belong to no tensor."""
        gaps, at = [], 0
        for tensor in self.tensors:
            if tensor.offset > at:
                gaps.append((at, tensor.offset - at))
            at = tensor.offset + tensor.length
        if self.size > at:
            gaps.append((at, self.size - at))
        return tuple(gaps)


class _Malformed(Exception):
    """The file is not what its name promises: it is laid out as plain bytes."""


def read_layout(path: Path) -> Layout:
    """The layout of a file, by the ending of its name. Never fails on content; `OSError` when it cannot be read."""
    size = path.stat().st_size
    find = {".onnx": _onnx_tensors, ".safetensors": _safetensors_tensors}.get(path.suffix)
    if find is not None and size > 0:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return Layout(size=size, container=path.suffix[1:], tensors=_in_order(find(data, size), size))
            except _Malformed:
                pass
    plain = Tensor(name="", dtype="uint8", shape=(size,), offset=0, length=size)
    return Layout(size=size, container="plain", tensors=(plain,) if size else ())


def _in_order(found: Iterator[Tensor], size: int) -> tuple[Tensor, ...]:
    """Sorted by position, empty ones left out; overlap, overrun or too many are `_Malformed`."""
    tensors = []
    for tensor in found:
        if tensor.length:
            tensors.append(tensor)
        if len(tensors) > MAX_TENSORS:
            raise _Malformed
    tensors.sort(key=lambda tensor: tensor.offset)
    at = 0
    for tensor in tensors:
        if tensor.offset < at or tensor.offset + tensor.length > size:
            raise _Malformed
        at = tensor.offset + tensor.length
    return tuple(tensors)


def _tensor(name: str, dtype: str | None, shape: tuple[int, ...], offset: int, length: int) -> Tensor:
    """As declared, where the declaration agrees with the byte count; plain bytes otherwise."""
    name = name if len(name) <= MAX_NAME else f"at {offset}"
    is_sane = dtype is not None and len(shape) <= 64 and all(0 <= n <= length for n in shape)
    if is_sane and dtype is not None and math.prod(shape) * DTYPES[dtype][0] == length:
        return Tensor(name=name, dtype=dtype, shape=shape, offset=offset, length=length)
    return Tensor(name=name, dtype="uint8", shape=(length,), offset=offset, length=length)


# --- safetensors: u64 header length, JSON header, data ---


def _safetensors_tensors(data: mmap.mmap, size: int) -> Iterator[Tensor]:
    header_bytes = int.from_bytes(data[:8], "little")
    start = 8 + header_bytes
    if size < 8 or header_bytes > MAX_HEADER_BYTES or start > size:
        raise _Malformed
    try:
        header = json.loads(data[8:start])
    except (ValueError, RecursionError) as exc:
        raise _Malformed from exc
    if not isinstance(header, dict):
        raise _Malformed
    for name, entry in header.items():
        if name != "__metadata__":
            yield _safetensors_entry(name, entry, start)


def _safetensors_entry(name: str, entry: Any, start: int) -> Tensor:
    try:
        begin, end = entry["data_offsets"]
        shape, kind = tuple(entry["shape"]), entry["dtype"]
    except (TypeError, ValueError, KeyError) as exc:
        raise _Malformed from exc
    if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)) or end < begin or not isinstance(kind, str):
        raise _Malformed
    return _tensor(name, _SAFETENSORS_TYPES.get(kind), shape, start + begin, end - begin)


# --- ONNX: ModelProto.graph (7) . initializer (5) . {dims 1, data_type 2, name 8, raw_data 9} ---


def _onnx_tensors(data: mmap.mmap, size: int) -> Iterator[Tensor]:
    for number, _, graph_start, graph_end in _fields(data, 0, size):
        if number == 7:
            for inner, _, start, end in _fields(data, graph_start, graph_end):
                if inner == 5 and (tensor := _onnx_initializer(data, start, end)) is not None:
                    yield tensor


def _onnx_initializer(data: mmap.mmap, start: int, end: int) -> Tensor | None:
    """None for a tensor without raw_data (typed fields or an external file): it stays in the skeleton."""
    dims: list[int] = []
    name, kind, raw = "", 0, (0, 0)
    for number, value, at, stop in _fields(data, start, end):
        if number == 1:
            dims += [value] if at == stop else _packed(data, at, stop)
        elif number == 2:
            kind = value
        elif number == 8:
            name = data[at : min(stop, at + MAX_NAME + 1)].decode("utf-8", "replace")
        elif number == 9:
            raw = (at, stop - at)
        if len(dims) > 64:
            raise _Malformed
    if raw[1] == 0:
        return None
    return _tensor(name, _ONNX_TYPES.get(kind), tuple(dims), *raw)


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(field number, value, start, end) of each field of a message; start = end for a number, value = 0 for bytes."""
    while at < end:
        tag, at = _varint(data, at, end)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at, end)
            yield tag >> 3, value, at, at
        elif kind == 2:
            length, at = _varint(data, at, end)
            if length > end - at:
                raise _Malformed
            yield tag >> 3, 0, at, at + length
            at += length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise _Malformed
    if at != end:
        raise _Malformed


def _packed(data: mmap.mmap, at: int, end: int) -> list[int]:
    values: list[int] = []
    while at < end and len(values) <= 64:
        value, at = _varint(data, at, end)
        values.append(value)
    return values


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise _Malformed
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _Malformed
