"""The content-addressed folder that a publisher writes and the sync service serves.

    objects/ab/<id>.full            one slab, whole
    packs/<release>/<base>.pack     what differs from release <base> (both digests), and its index beside it: .index
    metadata/                       signed TUF metadata; timestamp.json is replaced last
    targets/releases/<model>/...    manifests, desired/...: desired state; names carry their digest

Files appear whole or not at all (temporary name, fsync, rename) and objects never change, so any web server can serve
the same folder. Temporary files that a crash left behind have names that nobody asks for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from sync.disk import TEMPORARY, folder_lock, read_file, replacing, sync_folder, write_file

TIMESTAMP: Final = "metadata/timestamp.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file as a listing shows it. `modified`: seconds since 1970."""

    name: str
    size: int
    modified: float

    @property
    def is_temporary(self) -> bool:
        """Being written, or left behind by a crash."""
        return self.name.rpartition("/")[2].startswith(TEMPORARY)


class Store:
    """Reads and writes by name; knows nothing of what the bytes mean."""

    writers: int = 1
    look_s: float = 0.5  # between two looks for a new timestamp, which cost nothing here

    def __init__(self, root: Path) -> None:
        self.root = root
        self._unsynced: set[Path] = set()

    def where(self, name: str = "") -> str:
        """What people call a file of it, or all of it."""
        return str(self.root / name)

    # --- slab objects ---

    def put_full(self, slab: str, data: bytes) -> bool:
        return self._create(self._object(slab), data)

    def drop_full(self, slab: str) -> None:
        """Takes a damaged object out, so that it can be written anew."""
        self._object(slab).unlink(missing_ok=True)

    def full(self, slab: str) -> bytes | None:
        return read_file(self._object(slab))

    def full_bytes(self, slab: str) -> int | None:
        try:
            return self._object(slab).stat().st_size
        except FileNotFoundError:
            return None

    # --- packs ---

    @contextlib.contextmanager
    def new_pack(self, target: str, base: str) -> Iterator[BinaryIO]:
        """A file to write a pack to, which appears when the block ends. Nobody looks at it before it has an index."""
        path = self.root / pack_name(target, base)
        with replacing(path) as file:
            yield file
        self._note(path)

    @contextlib.contextmanager
    def open_pack(self, target: str, base: str) -> Iterator[BinaryIO | None]:
        """To read; None where there is none."""
        try:
            file = (self.root / pack_name(target, base)).open("rb")
        except FileNotFoundError:
            yield None
            return
        with file:
            yield file

    def put_index(self, target: str, base: str, data: bytes) -> None:
        self.replace(index_name(target, base), data)

    def index(self, target: str, base: str) -> bytes | None:
        return read_file(self.root / index_name(target, base))

    def drop_pack(self, target: str, base: str) -> None:
        """The index first: a pack without one is not looked at."""
        for name in (index_name(target, base), pack_name(target, base)):
            (self.root / name).unlink(missing_ok=True)

    def part(self, name: str, offset: int, length: int) -> tuple[int, bytes] | None:
        """Length of a file under ``objects/`` or ``packs/``, and what it has of a range; None when there is none."""
        path = self._path(name, ("objects", "packs"))
        if path is None:
            return None
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                wanted = max(0, min(length, size - offset))
                return size, os.pread(file.fileno(), wanted, offset) if wanted else b""
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    # --- everything ---

    def files(self, *folders: str) -> Iterator[StoredFile]:
        """Every file under `folders` (all of the store, where none is named), temporary ones included."""
        for folder in folders or ("",):
            yield from _walk(self.root / folder, f"{folder}/" if folder else "")

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is none."""
        try:
            return (self.root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def remove(self, name: str) -> None:
        """Takes a file out; durable after `sync`."""
        path = self.root / name
        path.unlink(missing_ok=True)
        self._unsynced.add(path.parent)

    def remove_empty(self, folder: str) -> None:
        """Takes a folder out if there is nothing in it."""
        path = self.root / folder
        with contextlib.suppress(OSError):
            path.rmdir()
            self._unsynced.add(path.parent)

    # --- signed files ---

    def read(self, name: str) -> bytes | None:
        """A file under ``metadata/`` or ``targets/``; None when there is none, or the name leads elsewhere."""
        path = self._path(name, ("metadata", "targets"))
        return None if path is None else read_file(path)

    def replace(self, name: str, data: bytes) -> None:
        """Writes a signed file durably, over an older one of that name."""
        path = self.root / name
        write_file(path, data)
        self._note(path)

    def sync(self) -> None:
        """Makes every name created so far durable: what is signed next may refer to it."""
        for folder in sorted(self._unsynced):
            with contextlib.suppress(FileNotFoundError):  # a folder that was removed since
                sync_folder(folder)
        self._unsynced.clear()

    @contextlib.contextmanager
    def lock(self, wait_s: float = 60.0) -> Iterator[None]:
        """One writer at a time, across processes. Raises `StoreBusy` after `wait_s`."""
        self.root.mkdir(parents=True, exist_ok=True)
        with folder_lock(self.root / "lock", wait_s):
            yield

    def _create(self, path: Path, data: bytes) -> bool:
        if path.exists():
            return False
        write_file(path, data)
        self._note(path)
        return True

    def _note(self, path: Path) -> None:
        self._unsynced |= {path.parent, path.parent.parent}

    def _path(self, name: str, folders: tuple[str, ...]) -> Path | None:
        """Where `name` is; None where it leads out of `folders`."""
        return self.root.joinpath(*name.split("/")) if is_within(name, folders) else None

    def _object(self, slab: str) -> Path:
        return self.root / object_name(slab)


def is_within(name: str, folders: tuple[str, ...]) -> bool:
    """Is it the name of a file below one of `folders`, and nothing that leads elsewhere?"""
    parts = name.split("/")
    return parts[0] in folders and len(parts) >= 2 and all(map(_is_plain, parts))


def object_name(slab: str) -> str:
    return f"objects/{slab[:2]}/{slab}.full"


def pack_name(target: str, base: str) -> str:
    return f"packs/{target}/{base}.pack"


def index_name(target: str, base: str) -> str:
    return f"packs/{target}/{base}.index"


def _walk(folder: Path, prefix: str) -> Iterator[StoredFile]:
    """Links are not followed; what goes away meanwhile is left out."""
    try:
        entries = sorted(os.scandir(folder), key=lambda one: one.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name, f"{prefix}{entry.name}/")
            continue
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            yield StoredFile(name=prefix + entry.name, size=status.st_size, modified=status.st_mtime)


def _is_plain(part: str) -> bool:
    is_name = part.isascii() and part.isprintable() and "\\" not in part
    return is_name and 0 < len(part) <= 255 and not part.startswith(".")
