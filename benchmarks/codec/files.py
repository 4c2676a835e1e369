"""Model files of the codec's benchmarks: safetensors, written from arrays and read back, nothing else of the format.

bf16 is an array of uint16 here, as numpy has no such type. int8 is made from it by one recipe: tensors of two or more
dimensions, one scale per index of the first, absmax / 127 (1 where that is 0), rounded to even; the rest is float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint16]  # bf16
Floats = NDArray[np.float32]
Tensors = dict[str, NDArray[Any]]
Shape = tuple[int, ...]
_NAMES: Final = {"uint16": "BF16", "float16": "F16", "float32": "F32", "int8": "I8", "int64": "I64"}
_TYPES: Final = {name: dtype for dtype, name in _NAMES.items()}
_TOP: Final = np.float32(127)


def write(path: Path, tensors: Tensors) -> Path:
    return write_each(path, {name: (str(one.dtype), one.shape) for name, one in tensors.items()}, tensors.__getitem__)


def write_each(path: Path, kinds: Mapping[str, tuple[str, Shape]], make: Callable[[str], NDArray[Any]]) -> Path:
    """Sorted by name, the header padded to 8 bytes; one tensor at a time is in memory."""
    header: dict[str, object] = {}
    at = 0
    for name, (dtype, shape) in sorted(kinds.items()):
        end = at + np.dtype(dtype).itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(kinds):
            file.write(make(name).tobytes())
    return path


def read(path: Path) -> Tensors:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    found: Tensors = {}
    for name, spec in header.items():
        begin, end = spec["data_offsets"]
        flat = np.frombuffer(data[start + begin : start + end], _TYPES[spec["dtype"]])
        found[name] = flat.reshape(spec["shape"])
    return found


def to_bf16(values: Floats) -> Words:
    """To the nearest, ties to even; values are finite."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_float(words: Words) -> Floats:
    return (words.astype(np.uint32) << 16).view(np.float32)


def quantized(tensors: Tensors, *, like: Tensors | None = None) -> Tensors:
    """int8 from bf16; with the scales of the quantized tensors `like`, or its own."""
    made: Tensors = {}
    for name, words in tensors.items():
        values = to_float(words)
        if values.ndim < 2:
            made[name] = values
            continue
        if like is None:
            most = np.abs(values).max(axis=tuple(range(1, values.ndim)), keepdims=True)
            scale = np.where(most > 0, most / _TOP, np.float32(1)).astype(np.float32)
        else:
            scale = like[f"{name}.scale"]
        made[name] = np.clip(np.rint(values / scale), -_TOP, _TOP).astype(np.int8)
        made[f"{name}.scale"] = scale
    return made
