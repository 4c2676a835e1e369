"""Cutting a file into slabs: the unit that has an identity, is stored once and travels alone.

A slab is whole rows of one tensor, at most `SLAB_BYTES` raw (a longer row is cut between elements). Tensors under
`SMALL_BYTES` merge with their neighbours of the same element type, in order of position. A group ends when it would
pass `GROUP_BYTES`, or after a tensor whose name says so (one name in 16, by hash): a tensor that appears, vanishes or
changes its size moves the borders of its own group only. The skeleton is cut in the same way, as bytes.
A slab's id is the BLAKE3 of its raw bytes (64 hex digits): no codec has a part in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from sync.containers import Layout, Tensor

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
    is_float: bool
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
    row = tensor.length // tensor.shape[0] if tensor.shape else tensor.length
    step = SLAB_BYTES // row * row if row <= SLAB_BYTES else SLAB_BYTES // tensor.width * tensor.width
    for index, start in enumerate(range(0, tensor.length, step)):
        piece = (tensor.offset + start, min(step, tensor.length - start))
        yield Cut(key=f"t/{tensor.name}/{index}", width=tensor.width, is_float=tensor.is_float, pieces=(piece,))


def _groups(small: list[Tensor]) -> Iterator[Cut]:
    kinds = sorted({(tensor.width, tensor.is_float) for tensor in small})
    for width, is_float in kinds:
        group: list[Tensor] = []
        for tensor in small:
            if (tensor.width, tensor.is_float) != (width, is_float):
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
    return Cut(key=f"m{first.width}/{first.name}", width=first.width, is_float=first.is_float, pieces=pieces)


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
                yield Cut(key=f"s/{index}", width=1, is_float=False, pieces=tuple(pieces))
                pieces, room, index = [], SLAB_BYTES, index + 1
    if pieces:
        yield Cut(key=f"s/{index}", width=1, is_float=False, pieces=tuple(pieces))
