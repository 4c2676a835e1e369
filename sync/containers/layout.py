"""What a container reader answers: which byte ranges of a file belong to which tensor, in order and without overlap.

Also the rules that every container shares: a declaration that its bytes do not bear out becomes plain bytes, ranges
that overlap or leave the file make the whole file plain, and how long a row is in the words of the codec.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sync.containers.kinds import KINDS

MAX_TENSORS: Final = 1 << 18
MAX_NAME: Final = 512
MAX_DIMS: Final = 64

ROW_OF_NONE: Final = 256  # elements per row where the tensor has no rows of its own
SHORT_ROW: Final = 64
LONG_ROW: Final = 4096
_SHORTEST_PART: Final = 512  # of a long row: shorter parts cost more side information than they tell


class Malformed(Exception):
    """The file is not what it promises: it is laid out as plain bytes."""


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
        """Bytes per word: what differences are taken between."""
        return KINDS[self.dtype].width

    @property
    def mantissa(self) -> int:
        """Bits below the exponent of a floating-point bit pattern; 0 for integers and bytes."""
        return KINDS[self.dtype].mantissa

    @property
    def row(self) -> int:
        """Words per row of the `ctx` form: one index of the first dimension. Rows under 64 are joined, rows over 4,096
        are taken by a later dimension or cut into equal parts; without a second dimension it is 256."""
        if len(self.shape) < 2:
            return ROW_OF_NONE
        rows = [self._words(math.prod(self.shape[axis:])) for axis in range(1, len(self.shape))]
        long = [row for row in rows if row > LONG_ROW]
        fits = rows[len(long)] if len(long) < len(rows) else 0
        if long and fits < _SHORTEST_PART:
            return _part(long[-1])
        return fits * -(-SHORT_ROW // fits)

    def _words(self, elements: int) -> int:
        """The words of so many elements, or of as many times that as make whole words."""
        kind = KINDS[self.dtype]
        size, word = elements * kind.block_bytes, kind.block * kind.width
        return max(1, size // math.gcd(size, word))


@functools.lru_cache(maxsize=1024)
def _part(row: int) -> int:
    """The largest divisor of a long row that is not too short, 4,096 where it has none."""
    return next((part for part in range(LONG_ROW, _SHORTEST_PART - 1, -1) if row % part == 0), LONG_ROW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A file's tensors, in order of position and without overlap."""

    size: int
    container: str  # onnx | onnx-data | safetensors | gguf | torch | plain
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


def plain(size: int) -> Layout:
    """One tensor of bytes."""
    tensor = Tensor(name="", dtype="uint8", shape=(size,), offset=0, length=size)
    return Layout(size=size, container="plain", tensors=(tensor,) if size else ())


def declared(name: str, dtype: str | None, shape: tuple[int, ...], offset: int, length: int) -> Tensor:
    """As declared, where the declaration agrees with the byte count; plain bytes otherwise."""
    name = name if _is_name(name) else f"at {offset}"
    if dtype is not None and length_of(dtype, shape, length) == length:
        return Tensor(name=name, dtype=dtype, shape=shape, offset=offset, length=length)
    return Tensor(name=name, dtype="uint8", shape=(length,), offset=offset, length=length)


def length_of(dtype: str, shape: tuple[int, ...], most: int) -> int | None:
    """The bytes of a tensor; None where it cannot lie in `most` bytes."""
    if len(shape) > MAX_DIMS or not all(0 <= n <= 8 * most for n in shape):
        return None
    length = KINDS[dtype].bytes_of(math.prod(shape))
    return length if length <= most else None


def in_order(found: Iterable[Tensor], size: int) -> tuple[Tensor, ...]:
    """Sorted by position. Empty ones are left out, and those after the first of the same bytes (shared storage);
    other overlap, overrun or too many are `Malformed`."""
    tensors: list[Tensor] = []
    for tensor in found:
        if tensor.length:
            tensors.append(tensor)
        if len(tensors) > MAX_TENSORS:
            raise Malformed
    tensors.sort(key=lambda tensor: tensor.offset)
    ordered: list[Tensor] = []
    at = 0
    for tensor in tensors:
        if ordered and (tensor.offset, tensor.length) == (ordered[-1].offset, ordered[-1].length):
            continue
        if tensor.offset < at or tensor.offset + tensor.length > size:
            raise Malformed
        ordered.append(tensor)
        at = tensor.offset + tensor.length
    return tuple(ordered)


def _is_name(name: str) -> bool:
    """Short, and text that can be written: a lone surrogate (JSON has them) cannot."""
    try:
        return len(name) <= MAX_NAME and bool(name.encode() or True)
    except UnicodeEncodeError:
        return False
