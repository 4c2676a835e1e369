"""Cutting a file into slabs: the unit that has an identity, is stored once and travels alone.

A slab is whole rows of one tensor, at most `SLAB_BYTES` raw (a longer row is cut between the codec's rows). Tensors
under `SMALL_BYTES` merge with their neighbours of the same width and mantissa, in order of position. A group ends when
it would pass `GROUP_BYTES`, or after a tensor whose name says so (one name in 16, by hash): a tensor that appears,
vanishes or changes its size moves the borders of its own group only. The skeleton is cut in the same way, as bytes.
A slab's id is the BLAKE3 of its raw bytes (64 hex digits): no codec has a part in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from sync.containers import Layout, Tensor
from sync.containers.layout import ROW_OF_NONE

SLAB_BYTES: Final = 1 << 20
MAX_SLAB_BYTES: Final = 4 << 20  # what a reader accepts: a later publisher may cut larger
SMALL_BYTES: Final = 16 << 10
GROUP_BYTES: Final = 64 << 10
_NAMES_PER_GROUP: Final = 16

Piece = tuple[int, int]  # offset in the file, length


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The place of one slab in a file. `key` names it across versions: the same key is the base of a delta."""

    key: str
    width: int  # bytes per element: 1, 2, 4, 8
    mantissa: int  # bits below the exponent, 0 for integers
    row: int  # elements per row of the codec's `ctx` form
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        return sum(length for _, length in self.pieces)


def cut(layout: Layout) -> tuple[Cut, ...]:
    """Every byte of the file in exactly one slab: skeleton first, then tensors by position, merged groups last."""
    small = [tensor for tensor in layout.tensors if tensor.length < SMALL_BYTES]
    large = [tensor for tensor in layout.tensors if tensor.length >= SMALL_BYTES]
    return (*_skeleton(layout), *(one for tensor in large for one in _rows(tensor)), *_groups(small))


def slab_id(raw: bytes) -> str:
    return blake3(raw).hexdigest()


def file_digest(fd: int) -> tuple[str, int]:
    """BLAKE3 of the whole file (64 hex digits), and its size."""
    hasher, at = blake3(), 0
    while chunk := os.pread(fd, SLAB_BYTES, at):
        hasher.update(chunk)
        at += len(chunk)
    return hasher.hexdigest(), at


def read_pieces(fd: int, pieces: tuple[Piece, ...]) -> bytes:
    """The raw bytes of a slab, by pread: mapped pages would count as this process's memory. Short at the file's end."""
    return b"".join(os.pread(fd, length, offset) for offset, length in pieces)


def write_pieces(fd: int, pieces: tuple[Piece, ...], raw: bytes) -> None:
    view, at = memoryview(raw), 0
    for offset, length in pieces:
        _write_all(fd, view[at : at + length], offset)
        at += length


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _rows(tensor: Tensor) -> Iterator[Cut]:
    unit = _unit(tensor)
    step = SLAB_BYTES // unit * unit
    for index, start in enumerate(range(0, tensor.length, step)):
        piece = (tensor.offset + start, min(step, tensor.length - start))
        key = f"t/{tensor.name}/{index}"
        yield Cut(key=key, width=tensor.width, mantissa=tensor.mantissa, row=tensor.row, pieces=(piece,))


def _unit(tensor: Tensor) -> int:
    """Bytes that stay together: a row of the tensor, or a row of the codec where that is several, or where it must."""
    coded = tensor.row * tensor.width
    row, rest = divmod(tensor.length, tensor.shape[0]) if tensor.shape else (0, 0)
    return row if rest == 0 and coded < row <= SLAB_BYTES else coded


def _groups(small: list[Tensor]) -> Iterator[Cut]:
    kinds = sorted({(tensor.width, tensor.mantissa) for tensor in small})
    for kind in kinds:
        group: list[Tensor] = []
        for tensor in small:
            if (tensor.width, tensor.mantissa) != kind:
                continue
            if group and sum(one.length for one in group) + tensor.length > GROUP_BYTES:
                yield _group(group)
                group = []
            group.append(tensor)
            if _ends_group(tensor.name):
                yield _group(group)
                group = []
        if group:
            yield _group(group)


def _group(group: list[Tensor]) -> Cut:
    first = group[0]
    pieces = tuple((tensor.offset, tensor.length) for tensor in group)
    key = f"m{first.width}/{first.name}"
    return Cut(key=key, width=first.width, mantissa=first.mantissa, row=ROW_OF_NONE, pieces=pieces)


def _ends_group(name: str) -> bool:
    return blake3(name.encode("utf-8", "replace")).digest()[0] % _NAMES_PER_GROUP == 0


def _skeleton(layout: Layout) -> Iterator[Cut]:
    pieces: list[Piece] = []
    room, index = SLAB_BYTES, 0
    for offset, length in layout.skeleton():
        while length:
            taken = min(length, room)
            pieces.append((offset, taken))
            offset, length, room = offset + taken, length - taken, room - taken
            if room == 0:
                yield Cut(key=f"s/{index}", width=1, mantissa=0, row=ROW_OF_NONE, pieces=tuple(pieces))
                pieces, room, index = [], SLAB_BYTES, index + 1
    if pieces:
        yield Cut(key=f"s/{index}", width=1, mantissa=0, row=ROW_OF_NONE, pieces=tuple(pieces))
