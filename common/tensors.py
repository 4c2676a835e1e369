"""Tensor datatypes of the Open Inference Protocol and their numpy twins.

Owns the datatype names, shape arithmetic and the BYTES layout (each element a little-endian uint32 length and that
many bytes, as the protocol's binary extension lays it down). numpy has no BF16: here it is a record of its 16 bits, so
that they pass unchanged and nobody takes them for integers. Leaves requests and answers to `common/request.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from common.errors import InvalidInput

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

BYTES = "BYTES"
BF16 = np.dtype([("bits", "<u2")])  # the upper half of a float32
_NUMPY: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": BF16,
    BYTES: np.dtype("O"),
}
_NAMES = {dtype: name for name, dtype in _NUMPY.items()}
_AS_THEY_ARE = frozenset(dtype for dtype in _NUMPY.values() if dtype.kind != "O")
DATATYPES = tuple(_NUMPY)
MAX_ELEMENTS = 1 << 40  # far over anything real; keeps shape products out of overflow
MAX_BYTES_ELEMENTS = 1 << 20  # of one BYTES tensor in a message: each is an object of its own, looked at one by one
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor as a model declares it: `shape` has -1 where a dimension is free; the first one is the batch."""

    name: str  # as callers write it
    datatype: str  # in the protocol's words: FP32, UINT8, INT64, BYTES ...
    shape: tuple[int, ...]  # the batch first; -1 where a dimension is free

    def __post_init__(self) -> None:
        if self.datatype not in _NUMPY:
            raise ValueError(f"datatype {self.datatype!r} of tensor {self.name!r} is not one of {', '.join(DATATYPES)}")
        if any(d < -1 or d == 0 for d in self.shape):
            raise ValueError(
                f"shape {list(self.shape)} of tensor {self.name!r} has a dimension that is neither -1 nor positive"
            )

    def matches(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.shape) and all(
            want in (-1, got) for want, got in zip(self.shape, shape, strict=True)
        )


def is_plain(value: object) -> TypeGuard[Array]:
    """Whether `as_tensor` would give back `value` itself: an array of numbers as the wire has them."""
    return type(value) is np.ndarray and value.dtype in _AS_THEY_ARE


def as_tensor(value: object, where: str) -> Array:
    """What a caller in this process passed, as the wire would have delivered it: little-endian, BYTES as objects.

    Raises `InvalidInput` for what is no array of one of the protocol's datatypes.
    """
    if is_plain(value):
        return value
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as exc:
        raise InvalidInput(where, f"no array: {exc}", ", ".join(DATATYPES)) from exc
    if array.dtype.kind in "SU":
        array = array.astype(object)
    if array.dtype.kind == "O":
        for element in array.ravel():
            if not isinstance(element, bytes | str):
                raise InvalidInput(where, "an array of objects other than bytes and str", ", ".join(DATATYPES))
            if isinstance(element, str) and not is_text(element):
                raise InvalidInput(where, f"{element[:40]!r} is not Unicode", "bytes, or text that UTF-8 can write")
        return array
    if array.dtype.name == "bfloat16":  # of libraries that bring one
        return array.view(BF16)
    little = array.dtype.newbyteorder("<")
    if little not in _NAMES:
        raise InvalidInput(where, f"an array of {array.dtype}", ", ".join(DATATYPES))
    return array.astype(little, copy=False)


def dtype_of(datatype: str, where: str) -> np.dtype[Any]:
    """The numpy dtype of a protocol datatype; raises `InvalidInput` for an unknown one."""
    try:
        return _NUMPY[datatype]
    except (KeyError, TypeError):
        raise InvalidInput(where, f"unknown datatype {datatype!r}", ", ".join(DATATYPES)) from None


def datatype_of(array: Array) -> str:
    """The protocol's name for an array's dtype (strings and objects are BYTES)."""
    if (name := _NAMES.get(array.dtype)) is not None:
        return name
    if array.dtype.kind in "OSU":
        return BYTES
    return _NAMES[array.dtype.newbyteorder("<")]


def is_text(text: str) -> bool:
    """Whether UTF-8 can write it: lone surrogates stand for bytes that were no text."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def widened(array: Array) -> Array:
    """BF16 as the float32 of the same values; anything else as it is."""
    if array.dtype != BF16:
        return array
    return (array.view("<u2").astype("<u4") << 16).view("<f4")


def narrowed(array: Array) -> Array:
    """float32 as the nearest BF16, ties to even. Infinities and NaN stay what they are."""
    bits = np.ascontiguousarray(array, "<f4").view("<u4")
    rounded = ((bits.astype("<u8") + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    quiet = ((bits >> 16) | 0x40).astype("<u2")
    return np.where(np.isnan(array), quiet, rounded).astype("<u2").view(BF16)


def element_count(shape: tuple[int, ...], where: str) -> int:
    """Product of a request's shape; raises `InvalidInput` for negative dimensions and overflowing products."""
    count = 1
    for dim in shape:
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
            raise InvalidInput(where, f"shape {list(shape)} has the dimension {dim!r}", "integers >= 0")
        count *= dim
        if max(count, dim) > MAX_ELEMENTS:
            raise InvalidInput(where, f"shape {list(shape)} has more than {MAX_ELEMENTS} elements", "a smaller shape")
    return count


def check_bytes_count(count: int, where: str) -> None:
    """Raises `InvalidInput` for a BYTES tensor of more elements than one message may bring."""
    if count > MAX_BYTES_ELEMENTS:
        raise InvalidInput(where, f"{count} BYTES elements", f"at most {MAX_BYTES_ELEMENTS} in one tensor")


def pack(array: Array) -> bytes:
    """Raw little-endian bytes of an array, row-major; BYTES elements are length-prefixed."""
    if array.dtype.kind in "OSU":
        parts: list[bytes] = []
        for element in array.ravel():
            data = element.encode() if isinstance(element, str) else element
            parts += (_LENGTH.pack(len(data)), data)
        return b"".join(parts)
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()


def unpack(data: bytes | memoryview, datatype: str, shape: tuple[int, ...], where: str) -> Array:
    """The array that `pack` made. Raises `InvalidInput` where bytes and shape disagree.

    The result may be a read-only view of `data`.
    """
    count = element_count(shape, f"{where}.shape")
    dtype = dtype_of(datatype, f"{where}.datatype")
    if datatype == BYTES:
        return _unpack_bytes(memoryview(data), count, where).reshape(shape)
    if len(data) != count * dtype.itemsize:
        raise InvalidInput(
            where, f"{len(data)} bytes of data", f"{count * dtype.itemsize} bytes for {datatype} {list(shape)}"
        )
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def _unpack_bytes(data: memoryview, count: int, where: str) -> Array:
    if count * 4 > len(data):
        raise InvalidInput(
            where, f"{len(data)} bytes of data", f"at least {count * 4} bytes for {count} BYTES elements"
        )
    out = np.empty(count, dtype=object)
    offset, end, length_at = 0, len(data), _LENGTH.unpack_from
    for i in range(count):
        if offset + 4 > end:
            raise InvalidInput(where, f"BYTES element {i} has no length prefix", "a uint32 length before each element")
        (length,) = length_at(data, offset)
        offset += 4
        if length > end - offset:
            raise InvalidInput(where, f"BYTES element {i} says {length} bytes, {end - offset} are left")
        out[i] = bytes(data[offset : offset + length])
        offset += length
    if offset != len(data):
        raise InvalidInput(where, f"{len(data) - offset} bytes after the last BYTES element", "none")
    return out
