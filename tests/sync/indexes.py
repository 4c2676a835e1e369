"""Indexes taken apart and put together by hand, and manifests for them to speak of."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import zstandard
from blake3 import blake3

from sync.release import FileEntry, Manifest, SlabEntry


def manifest_of(
    slabs: Sequence[tuple[str, int]], *, kinds: Sequence[tuple[int, int]] | None = None, content: str | None = None
) -> Manifest:
    """`slabs`: (id, length), one behind the other in one file. `kinds`: (width, mantissa) of each, fp32 where None.
    `content`: what the digest is made from."""
    entries, at = [], 0
    for number, (slab, length) in enumerate(slabs):
        width, mantissa = (4, 23) if kinds is None else kinds[number]
        one = SlabEntry(id=slab, key=f"t/w/{number}", width=width, mantissa=mantissa, pieces=((at, length),))
        entries.append(one)
        at += length
    digest = blake3((str(slabs) if content is None else content).encode()).hexdigest()
    file = FileEntry(path="f", size=at, digest=digest, tensors=(), slabs=tuple(entries))
    return Manifest(model="m", version="2", parent=None, files=(file,), shared=("f",), variants=())


def signed(index: bytes) -> bytes:
    """With the hash that an index of these bytes has."""
    return index[:-8] + blake3(index[:-8]).digest(8)


def patched(index: bytes, at: int, data: bytes) -> bytes:
    return signed(index[:at] + data + index[at + len(data) :])


def with_entries(index: bytes, *entries: bytes, sets: int = 1) -> bytes:
    """The index with these entries (26 bytes each) instead of its own."""
    planes = bytes(entry[at] for at in range(26) for entry in entries)
    head = index[: 92 + 12 * sets]
    return patched(head + zstandard.compress(planes) + bytes(8), 8, struct.pack("<I", len(entries)))


def entries_of(index: bytes, sets: int) -> list[bytes]:
    planes = zstandard.decompress(index[92 + 12 * sets : -8])
    count = len(planes) // 26
    return [bytes(planes[at * count + number] for at in range(26)) for number in range(count)]
