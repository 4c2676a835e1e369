"""ONNX: ModelProto.graph (7) . initializer (5), with the data inside (raw_data) or in a file beside the model.

A TensorProto is {dims 1, data_type 2, name 8, raw_data 9, external_data 13: {key 1, value 2}}. External data lies in
the file `location`, `length` bytes at `offset`: that file has no header of its own, so it is laid out by the models in
its folder that refer to it. Tensors in typed fields, and constants inside nodes, stay in the skeleton.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

from sync.containers.layout import MAX_DIMS, MAX_NAME, Malformed, Tensor, declared, length_of
from sync.containers.source import Source

_TYPES: Final = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
    17: "float8_e4m3fn", 18: "float8_e4m3fnuz", 19: "float8_e5m2", 20: "float8_e5m2fnuz", 21: "uint4", 22: "int4",
    23: "float4_e2m1", 24: "float8_e8m0", 25: "uint2", 26: "int2", 27: "float6_e2m3", 28: "float6_e3m2",
}  # fmt: skip
_MAX_TEXT: Final = 4096  # of a location
_MAX_ENTRIES: Final = 16  # of external_data


@dataclass(slots=True, kw_only=True)
class _Initializer:
    name: str = ""
    kind: int = 0
    dims: list[int] = field(default_factory=list)
    raw: tuple[int, int] = (0, 0)
    external: dict[str, str] = field(default_factory=dict)

    def tensor(self, offset: int, length: int) -> Tensor:
        return declared(self.name, _TYPES.get(self.kind), tuple(self.dims), offset, length)


def find_tensors(source: Source) -> Iterator[Tensor]:
    """Those whose bytes are in the model file itself."""
    for initializer in _initializers(source):
        if initializer.raw[1]:
            yield initializer.tensor(*initializer.raw)


def find_external(source: Source, name: str, size: int) -> Iterator[Tensor]:
    """Those that the model in `source` keeps in the file `name` beside it, which has `size` bytes."""
    for initializer in _initializers(source):
        location = initializer.external.get("location")
        if location is not None and PurePosixPath(location).parts == (name,):
            yield initializer.tensor(*_external_range(initializer, size))


def external_locations(source: Source) -> Iterator[str]:
    for initializer in _initializers(source):
        if (location := initializer.external.get("location")) is not None:
            yield location


def _external_range(initializer: _Initializer, size: int) -> tuple[int, int]:
    """Without a length, as long as its type and shape say; where they are unknown, to the end of the file."""
    offset = _number(initializer.external.get("offset", "0"))
    if offset > size:
        raise Malformed
    if "length" in initializer.external:
        return offset, _number(initializer.external["length"])
    dtype = _TYPES.get(initializer.kind)
    length = None if dtype is None else length_of(dtype, tuple(initializer.dims), size - offset)
    return offset, size - offset if length is None else length


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise Malformed
    return int(text)


def _initializers(source: Source) -> Iterator[_Initializer]:
    for number, _, graph_start, graph_end in _fields(source, 0, source.size):
        if number == 7:
            for inner, _, start, end in _fields(source, graph_start, graph_end):
                if inner == 5:
                    yield _initializer(source, start, end)


def _initializer(source: Source, start: int, end: int) -> _Initializer:
    found = _Initializer()
    for number, value, at, stop in _fields(source, start, end):
        if number == 1:
            found.dims += [value] if at == stop else _packed(source, at, stop)
        elif number == 2:
            found.kind = value
        elif number == 8:
            found.name = _text(source, at, min(stop, at + MAX_NAME + 1))
        elif number == 9:
            found.raw = (at, stop - at)
        elif number == 13:
            key, text = _pair(source, at, stop)
            found.external[key] = text
        if len(found.dims) > MAX_DIMS or len(found.external) > _MAX_ENTRIES:
            raise Malformed
    return found


def _pair(source: Source, start: int, end: int) -> tuple[str, str]:
    texts = {1: "", 2: ""}
    for number, _, at, stop in _fields(source, start, end):
        if number in texts:
            texts[number] = _text(source, at, min(stop, at + _MAX_TEXT))
    return texts[1], texts[2]


def _text(source: Source, start: int, end: int) -> str:
    return source.read(start, end - start).decode("utf-8", "replace")


def _fields(source: Source, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(field number, value, start, end) of each field of a message; start = end for a number, value = 0 for bytes."""
    while at < end:
        tag, at = _varint(source, at, end)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(source, at, end)
            yield tag >> 3, value, at, at
        elif kind == 2:
            length, at = _varint(source, at, end)
            if length > end - at:
                raise Malformed
            yield tag >> 3, 0, at, at + length
            at += length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise Malformed
    if at != end:
        raise Malformed


def _packed(source: Source, at: int, end: int) -> list[int]:
    values: list[int] = []
    while at < end and len(values) <= MAX_DIMS:
        value, at = _varint(source, at, end)
        values.append(value)
    return values


def _varint(source: Source, at: int, end: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(source.read(at, min(10, end - at))):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise Malformed
