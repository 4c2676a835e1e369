"""What is on this node's disk: slabs of installed releases, by id and by place, read and hashed each time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from blake3 import blake3

from sync.agent.files import OpenFiles
from sync.agent.journal import Release
from sync.release import FileEntry, Manifest, SlabEntry
from sync.slabs import SLAB_BYTES, Piece, read_pieces, slab_id


class LocalSlabs:
    """The slabs of releases on this node's disk, by id and by place."""

    def __init__(self, releases: Sequence[tuple[Release, Path]]) -> None:
        self._where: dict[str, list[tuple[str, tuple[Piece, ...]]]] = {}
        self._at: dict[str, dict[tuple[str, str], SlabEntry]] = {}
        self._manifests: dict[str, Manifest] = {}
        self._open = OpenFiles(os.O_RDONLY)
        for release, folder in sorted(releases, key=lambda one: int(one[0].manifest.version), reverse=True):
            paths = set(release.paths())
            self._manifests.setdefault(release.manifest.digest(), release.manifest)
            for file in release.manifest.files:
                if file.path in paths:
                    self._add(file, str(folder / file.path), self._at.setdefault(release.manifest.digest(), {}))

    def read(self, slab: str) -> bytes | None:
        """The slab's bytes, hashed just now; None when no file here has them (any more)."""
        for path, pieces in self._where.get(slab, ()):
            try:
                raw = read_pieces(self._open.fd(path), pieces)
            except OSError:
                continue
            if slab_id(raw) == slab:
                return raw
        return None

    def holds(self, slab: str) -> bool:
        return self.read(slab) is not None

    def releases(self) -> tuple[str, ...]:
        """Digests of what is here, newest first."""
        return tuple(self._at)

    def manifest(self, release: str) -> Manifest:
        """Of one of `releases`."""
        return self._manifests[release]

    def base_in(self, release: str, path: str, slab: SlabEntry) -> str | None:
        """The slab at that place in a release, if it could be the base of a difference."""
        base = self._at[release].get((path, slab.key))
        is_base = base is not None and base.length == slab.length and base.id != slab.id
        return base.id if base is not None and is_base else None

    def close(self) -> None:
        """Lets go of the files; they are opened again when they are read."""
        self._open.close()

    def _add(self, file: FileEntry, path: str, places: dict[tuple[str, str], SlabEntry]) -> None:
        for slab in file.slabs:
            self._where.setdefault(slab.id, []).append((path, slab.pieces))
            places[file.path, slab.key] = slab


def verify_files(release: Release, folder: Path) -> str | None:
    """None when every file of the release is in `folder` and whole; else what is wrong."""
    paths = set(release.paths())
    for file in release.manifest.files:
        if file.path in paths and file_hash(folder / file.path) != file.digest:
            return f"file {file.path} of {release.manifest.name} is missing or damaged"
    return None


def file_hash(path: Path, check: Callable[[], None] = lambda: None) -> str | None:
    """BLAKE3 of the file; None where it cannot be opened. `check` is called between the chunks, and may raise."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        hasher, at = blake3(), 0
        while chunk := os.pread(fd, SLAB_BYTES, at):
            hasher.update(chunk)
            at += len(chunk)
            check()
        return hasher.hexdigest()
    finally:
        os.close(fd)
