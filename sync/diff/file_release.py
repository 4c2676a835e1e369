"""One file as a release of its own: cut into slabs that are named, with the manifest that a publisher would sign.

What `outrider sync diff` compares, and what it rebuilds from. Files are read by pread, one slab at a time.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.errors import FileChanged
from sync.containers import Layout, Tensor, read_layout
from sync.release import FileEntry, Manifest, SlabEntry, TensorEntry
from sync.slabs import Cut, cut, file_digest, read_pieces, slab_id

MODEL: Final = "file"
NOBODY: Final = -1
_PATH: Final = "file"  # the same for every file: the place of a slab is its key alone
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRelease:
    """`cuts` and the manifest's slabs go together, one by one."""

    path: Path
    fd: int
    layout: Layout
    cuts: tuple[Cut, ...]
    manifest: Manifest

    @property
    def slabs(self) -> tuple[SlabEntry, ...]:
        return self.manifest.files[0].slabs

    def read(self, slab: SlabEntry) -> bytes:
        """Its bytes, which are those that it is named after. Raises `FileChanged`."""
        raw = read_pieces(self.fd, slab.pieces)
        if slab_id(raw) != slab.id:
            raise FileChanged(str(self.path))
        return raw

    def chunks(self, tensor: Tensor) -> Iterator[bytes]:
        """A tensor's bytes, 1 MiB at a time. Raises `FileChanged`."""
        for start in range(0, tensor.length, _CHUNK):
            wanted = min(_CHUNK, tensor.length - start)
            data = os.pread(self.fd, wanted, tensor.offset + start)
            if len(data) != wanted:
                raise FileChanged(str(self.path))
            yield data


@contextlib.contextmanager
def opened(path: Path, *, version: int) -> Iterator[FileRelease]:
    """Reads all of the file, twice. `OSError` where it cannot be read, `FileChanged` where it does not stand still."""
    layout = read_layout(path)
    cuts = cut(layout)
    fd = os.open(path, os.O_RDONLY)
    try:
        slabs = tuple(_named(fd, one) for one in cuts)
        digest, size = file_digest(fd)
        if size != layout.size:
            raise FileChanged(str(path))
        file = FileEntry(path=_PATH, size=layout.size, digest=digest, tensors=_tensors(layout, cuts), slabs=slabs)
        manifest = Manifest(
            model=MODEL,
            version=str(version),
            parent=str(version - 1) if version > 1 else None,
            files=(file,),
            shared=(_PATH,),
            variants=(),
        )
        yield FileRelease(path=path, fd=fd, layout=layout, cuts=cuts, manifest=manifest)
    finally:
        os.close(fd)


class Owners:
    """Whose bytes are in a slab."""

    def __init__(self, layout: Layout) -> None:
        self._starts = [tensor.offset for tensor in layout.tensors]
        self._stops = [tensor.offset + tensor.length for tensor in layout.tensors]
        self._size = layout.size

    def of(self, one: Cut) -> Iterator[tuple[int, int]]:
        """The tensors (by number; `NOBODY`: the skeleton) that it has bytes of, and how many."""
        for offset, length in one.pieces:
            at, end = offset, offset + length
            while at < end:
                number, stop = self._at(at)
                yield number, min(end, stop) - at
                at = stop

    def _at(self, offset: int) -> tuple[int, int]:
        """To whom a byte belongs, and up to where that goes on."""
        number = bisect_right(self._starts, offset) - 1
        if number >= 0 and offset < self._stops[number]:
            return number, self._stops[number]
        return NOBODY, self._starts[number + 1] if number + 1 < len(self._starts) else self._size


def _named(fd: int, one: Cut) -> SlabEntry:
    slab = slab_id(read_pieces(fd, one.pieces))
    return SlabEntry(id=slab, key=one.key, width=one.width, mantissa=one.mantissa, pieces=one.pieces)


def _tensors(layout: Layout, cuts: tuple[Cut, ...]) -> tuple[TensorEntry, ...]:
    found: list[list[int]] = [[] for _ in layout.tensors]
    owners = Owners(layout)
    for index, one in enumerate(cuts):
        for number, _ in owners.of(one):
            if number != NOBODY and index not in found[number][-1:]:
                found[number].append(index)
    return tuple(
        TensorEntry(name=one.name, dtype=one.dtype, shape=one.shape, offset=one.offset, slabs=tuple(slabs))
        for one, slabs in zip(layout.tensors, found, strict=True)
    )
