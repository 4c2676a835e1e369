"""Putting a release together in a staging folder: what the node has is copied, what is missing is fetched.

Nothing on the disk is taken on faith: a slab counts as local only after its bytes were read and hashed, in the staging
folder (an interrupted fetch goes on where it was) or in the files of an installed version. Slabs stream: one is in
memory at a time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from blake3 import blake3

from common.errors import BadRelease, CorruptSlab, FetchError
from sync import codec
from sync.agent.journal import Release
from sync.agent.ports import Source, Want
from sync.release import FileEntry, SlabEntry
from sync.slabs import Piece, read_pieces, slab_id, write_pieces
from sync.store import sync_folder

MAX_BASES: Final = 16  # offered per slab: what a service takes
BATCH_BYTES: Final = 4 << 20  # raw bytes asked for in one call: bounds what a broken connection costs


@dataclass(slots=True, kw_only=True)
class Fetched:
    """What one assembly cost. Bytes are whole objects as received, by form."""

    bytes_by_form: Counter[str] = field(default_factory=Counter)
    fetched: int = 0
    reused: int = 0
    fallbacks: int = 0


class LocalSlabs:
    """The slabs of releases on this node's disk, by id and by place."""

    def __init__(self, releases: Sequence[tuple[Release, Path]]) -> None:
        self._where: dict[str, list[tuple[Path, tuple[Piece, ...]]]] = {}
        self._at: dict[tuple[str, str], list[SlabEntry]] = {}
        for release, folder in releases:
            paths = set(release.paths())
            for file in release.manifest.files:
                if file.path in paths:
                    self._add(file, folder / file.path)

    def read(self, slab: str) -> bytes | None:
        """The slab's bytes, hashed just now; None when no file here has them (any more)."""
        for path, pieces in self._where.get(slab, ()):
            raw = _read(path, pieces)
            if raw is not None and slab_id(raw) == slab:
                return raw
        return None

    def bases(self, path: str, slab: SlabEntry) -> tuple[str, ...]:
        """Slabs at the same place in other versions that could serve as a base, proven to be here."""
        near = (base for base in self._at.get((path, slab.key), ()) if base.length == slab.length)
        return tuple(base.id for base in near if self.read(base.id) is not None)[:MAX_BASES]

    def _add(self, file: FileEntry, path: Path) -> None:
        for slab in file.slabs:
            self._where.setdefault(slab.id, []).append((path, slab.pieces))
            self._at.setdefault((file.path, slab.key), []).append(slab)


class Assembly:
    """One release being put together in `folder`."""

    def __init__(self, release: Release, folder: Path, local: LocalSlabs) -> None:
        self._folder, self._local = folder, local
        paths = set(release.paths())
        self._name = release.manifest.name
        self._files = [file for file in release.manifest.files if file.path in paths]
        self._places: dict[str, list[tuple[FileEntry, SlabEntry]]] = {}
        for file in self._files:
            for slab in file.slabs:
                self._places.setdefault(slab.id, []).append((file, slab))

    def run(self, source: Source, result: Fetched) -> None:
        """Fills the folder, counting into `result` as it goes.

        Raises `FetchError` (try again: what is here stays), or `BadRelease` when slabs do not add up to the file.
        """
        missing = self._take_local(result)
        self._fetch(source, missing, result)
        for file in self._files:
            _finish(self._folder / file.path, file, self._name)
        for folder in {self._folder / parent for file in self._files for parent in Path(file.path).parents}:
            sync_folder(folder)

    def _take_local(self, result: Fetched) -> list[Want]:
        """Copies every slab that is on this disk; returns the others, with the bases that could help."""
        names = {self._folder / file.path for file in self._files}
        for path in self._folder.rglob("*"):
            if path not in names and not path.is_dir():
                path.unlink()  # of an earlier try, when the node took another variant
        for file in self._files:
            _make_file(self._folder / file.path, file.size)
        wants = []
        for slab, places in self._places.items():
            file, entry = places[0]
            if self._is_staged(slab):
                continue
            raw = self._local.read(slab)
            if raw is not None:
                self._write(slab, raw)
                result.reused += 1
            else:
                wants.append(Want(id=slab, length=entry.length, bases=self._local.bases(file.path, entry)))
        return wants

    def _is_staged(self, slab: str) -> bool:
        """All places of the slab in the staging folder hold it already: an earlier try got this far."""
        for file, entry in self._places[slab]:
            raw = _read(self._folder / file.path, entry.pieces)
            if raw is None or slab_id(raw) != slab:
                return False
        return True

    def _fetch(self, source: Source, wants: Sequence[Want], result: Fetched) -> None:
        again: list[Want] = []
        for batch in _batches(wants):
            for want, data in _answers(source, batch):
                try:
                    self._accept(want, data, result)
                except CorruptSlab as exc:
                    if not want.bases:
                        raise FetchError(f"slab {want.id}", f"the full object is corrupt: {exc.problem}") from exc
                    again.append(Want(id=want.id, length=want.length))
        if again:
            result.fallbacks += len(again)
            self._fetch(source, again, result)

    def _accept(self, want: Want, data: bytes, result: Fetched) -> None:
        try:
            header = codec.read_header(data, want.id)
        except CorruptSlab:
            result.bytes_by_form["unreadable"] += len(data)
            raise
        result.bytes_by_form[header.form_name] += len(data)
        base = None if header.base is None else self._local.read(header.base)
        self._write(want.id, codec.decode(data, slab=want.id, length=want.length, base=base))
        result.fetched += 1

    def _write(self, slab: str, raw: bytes) -> None:
        for file, entry in self._places[slab]:
            fd = os.open(self._folder / file.path, os.O_WRONLY)
            try:
                write_pieces(fd, entry.pieces, raw)
            finally:
                os.close(fd)


def verify_files(release: Release, folder: Path) -> str | None:
    """None when every file of the release is in `folder` and whole; else what is wrong."""
    paths = set(release.paths())
    for file in release.manifest.files:
        if file.path in paths and _hash(folder / file.path) != file.digest:
            return f"file {file.path} of {release.manifest.name} is missing or damaged"
    return None


def _answers(source: Source, batch: Sequence[Want]) -> Iterator[tuple[Want, bytes]]:
    """Pairs answers with what was asked for; one too few is a `FetchError`."""
    answers = source.fetch(batch)
    for want in batch:
        slab, data = next(answers, (None, b""))
        if slab != want.id:
            raise FetchError(f"slab {want.id}", "the answer ended early")
        yield want, data


def _batches(wants: Sequence[Want]) -> Iterator[list[Want]]:
    batch: list[Want] = []
    for want in wants:
        if batch and sum(one.length for one in batch) + want.length > BATCH_BYTES:
            yield batch
            batch = []
        batch.append(want)
    if batch:
        yield batch


def _make_file(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.truncate(size)


def _finish(path: Path, file: FileEntry, release: str) -> None:
    """The whole file's hash, then its bytes on the disk."""
    if _hash(path) != file.digest:
        raise BadRelease(release, f"file {file.path}: its slabs do not give the hash that the manifest declares")
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _hash(path: Path) -> str | None:
    hasher, at = blake3(), 0
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        while chunk := os.pread(fd, 1 << 20, at):
            hasher.update(chunk)
            at += len(chunk)
    finally:
        os.close(fd)
    return hasher.hexdigest()


def _read(path: Path, pieces: tuple[Piece, ...]) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return read_pieces(fd, pieces)
    except OSError:
        return None
    finally:
        os.close(fd)
