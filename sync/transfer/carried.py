"""The file that carries releases: a zip, uncompressed, whose entries have the names that a store has.

    transfer.json                format 1: which release of which model is in it (what it says is not believed)
    metadata/ targets/           the signed files, all that are valid now
    objects/ packs/              slabs, each whole, or what differs from a release that is there already

A zip ends with its table of contents, so one that was cut off is known by that; every entry has a checksum. Neither
proves anything: whoever takes the file in verifies what is in the entries.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self

from common.config import from_json, to_json
from common.errors import ConfigError, FetchError, TransferRefused
from sync.disk import sync_folder
from sync.store import StoredFile, is_within

FORMAT: Final = 1
_LABEL: Final = "transfer.json"
_FOLDERS: Final = ("metadata", "targets", "objects", "packs")
_LABEL_BYTES: Final = 1 << 20
_CHUNK_BYTES: Final = 1 << 20
_TIME: Final = (1980, 1, 1, 0, 0, 0)  # the same content gives the same file


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """`releases`: the version of each model that is in the file."""

    releases: dict[str, str]
    format: int = FORMAT


class Carried:
    """A file of releases, opened to read."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        """Raises `TransferRefused` when it is no such file, or there is in it what has no place in a store."""
        self.path, self._archive = path, archive
        self._entries: dict[str, zipfile.ZipInfo] = {}
        for one in archive.infolist():
            if one.filename in self._entries:
                raise self.refused(f"{one.filename} is in it twice")
            if one.filename != _LABEL and not is_within(one.filename, _FOLDERS):
                raise self.refused(f"{one.filename!r} is in it, which is no name in a store")
            if one.compress_type != zipfile.ZIP_STORED or one.flag_bits & 1 or one.compress_size != one.file_size:
                raise self.refused(f"{one.filename} is compressed or encrypted; accepted: entries as they are")
            self._entries[one.filename] = one
        self.label = self._read_label()

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path) -> Iterator[Self]:
        """Raises `TransferRefused`, and `OSError` where the file cannot be opened."""
        try:
            archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, ValueError) as exc:
            raise TransferRefused(str(path), f"it was cut off, or is no file that `sync export` wrote: {exc}") from exc
        with archive:
            yield cls(path, archive)

    def refused(self, problem: str) -> TransferRefused:
        return TransferRefused(str(self.path), problem)

    def names(self, folder: str) -> tuple[str, ...]:
        return tuple(name for name in self._entries if name.startswith(f"{folder}/"))

    def files(self, *folders: str) -> Iterator[StoredFile]:
        """As a store's."""
        for folder in folders:
            for name in self.names(folder):
                yield StoredFile(name=name, size=self._entries[name].file_size, modified=0.0)

    def read(self, name: str) -> bytes | None:
        """All of an entry; None where there is none of that name. `TransferRefused` where it is damaged."""
        return b"".join(self.chunks(name)) if name in self._entries else None

    def fetch(self, name: str) -> Iterator[bytes]:
        """An entry in chunks; a permanent `FetchError` where there is none of that name."""
        if name not in self._entries:
            raise FetchError(name, "is not in the file", is_permanent=True)
        yield from self.chunks(name)

    def chunks(self, name: str) -> Iterator[bytes]:
        with self.entry(name) as file:
            while data := file.read(_CHUNK_BYTES):
                yield data

    @contextlib.contextmanager
    def entry(self, name: str) -> Iterator[IO[bytes]]:
        """Opened to read; `TransferRefused` where it is not what its checksum says."""
        try:
            with self._archive.open(self._entries[name]) as file:
                yield file
        except (zipfile.BadZipFile, EOFError, NotImplementedError) as exc:
            raise self.refused(f"{name} is damaged: {exc}") from exc

    def _read_label(self) -> Label:
        if _LABEL not in self._entries or self._entries[_LABEL].file_size > _LABEL_BYTES:
            raise self.refused(f"{_LABEL} is not in it: no file that `sync export` wrote")
        try:
            label: Label = from_json(self.read(_LABEL) or b"", Label, _LABEL)
        except ConfigError as exc:
            raise self.refused(str(exc)) from exc
        if label.format != FORMAT:
            raise self.refused(f"it has format {label.format}, this version reads format {FORMAT}")
        return label


def write(path: Path, releases: Mapping[str, str], entries: Iterable[tuple[str, int, Iterable[bytes]]]) -> int:
    """`entries`: name, length and content of each. Returns the file's bytes; it is there whole or not at all."""
    label = to_json(Label(releases=dict(releases)))
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name, length, chunks in (((_LABEL, len(label), [label])), *entries):
                    _add(archive, name, length, chunks)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return path.stat().st_size


def _add(archive: zipfile.ZipFile, name: str, length: int, chunks: Iterable[bytes]) -> None:
    info: Any = zipfile.ZipInfo(name, _TIME)
    info.external_attr = 0o644 << 16
    with archive.open(info, "w", force_zip64=length >= 1 << 31) as file:
        for chunk in chunks:
            file.write(chunk)
