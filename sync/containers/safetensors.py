"""safetensors: u64 header length, JSON header, data. The header is read, never the data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from sync.containers.layout import MAX_TENSORS, Malformed, Tensor, declared
from sync.containers.source import Source

MAX_HEADER_BYTES: Final = 32 << 20  # the format allows 100 MB; `MAX_TENSORS` with long names need a third of it

_TYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0", "F4": "float4_e2m1", "F6_E2M3": "float6_e2m3",
    "F6_E3M2": "float6_e3m2", "C64": "complex64",
}  # fmt: skip


def find_tensors(source: Source) -> Iterator[Tensor]:
    length = int.from_bytes(source.fetch(0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise Malformed
    for name, entry in _header(source.fetch(8, length)).items():
        if name != "__metadata__":
            yield _entry(name, entry, 8 + length)


def _header(text: bytes) -> dict[str, Any]:
    """The counts bound what the parser may build, before it builds it."""
    if text.count(b"{") > 2 * MAX_TENSORS or text.count(b"[") > 4 * MAX_TENSORS or text.count(b",") > 16 * MAX_TENSORS:
        raise Malformed
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise Malformed from exc
    if not isinstance(header, dict):
        raise Malformed
    return header


def _entry(name: str, entry: Any, start: int) -> Tensor:
    try:
        begin, end = entry["data_offsets"]
        shape, kind = tuple(entry["shape"]), entry["dtype"]
    except (TypeError, ValueError, KeyError) as exc:
        raise Malformed from exc
    if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)) or end < begin or not isinstance(kind, str):
        raise Malformed
    return declared(name, _TYPES.get(kind), shape, start + begin, end - begin)
