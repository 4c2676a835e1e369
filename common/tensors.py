"""Tensor datatypes of the Open Inference Protocol and their numpy twins.

Owns the datatype names, shape arithmetic and the BYTES layout (each element a little-endian uint32 length and that
many bytes, as the protocol's binary extension lays it down). Leaves requests and answers to `common/request.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import InvalidInput

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

BYTES = "BYTES"
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
    BYTES: np.dtype("O"),
}
_NAMES = {dtype: name for name, dtype in _NUMPY.items()}
DATATYPES = tuple(_NUMPY)
MAX_ELEMENTS = 1 << 40  # far over anything real; keeps shape products out of overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor as a model declares it: `shape` has -1 where a dimension is free; the first one is the batch."""

    name: str
    datatype: str
    shape: tuple[int, ...]

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


def as_tensor(value: object, where: str) -> Array:
    """What a caller in this process passed, as the wire would have delivered it: little-endian, BYTES as objects.

    Raises `InvalidInput` for what is no array of one of the protocol's datatypes.
    """
    array = np.asarray(value)
    if array.dtype.kind in "SU":
        array = array.astype(object)
    if array.dtype.kind == "O":
        if not all(isinstance(element, bytes | str) for element in array.ravel()):
            raise InvalidInput(where, "an array of objects other than bytes and str", ", ".join(DATATYPES))
        return array
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
    if array.dtype.kind in "OSU":
        return BYTES
    return _NAMES[array.dtype.newbyteorder("<") if array.dtype.itemsize > 1 else array.dtype]


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


def pack(array: Array) -> bytes:
    """Raw little-endian bytes of an array, row-major; BYTES elements are length-prefixed."""
    if array.dtype.kind in "OSU":
        parts: list[bytes] = []
        for element in array.ravel():
            data = element.encode() if isinstance(element, str) else element
            parts += (struct.pack("<I", len(data)), data)
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
    offset = 0
    for i in range(count):
        if offset + 4 > len(data):
            raise InvalidInput(where, f"BYTES element {i} has no length prefix", "a uint32 length before each element")
        (length,) = struct.unpack_from("<I", data, offset)
        offset += 4
        if length > len(data) - offset:
            raise InvalidInput(where, f"BYTES element {i} says {length} bytes, {len(data) - offset} are left")
        out[i] = bytes(data[offset : offset + length])
        offset += length
    if offset != len(data):
        raise InvalidInput(where, f"{len(data) - offset} bytes after the last BYTES element", "none")
    return out
