"""The content-addressed folder that a publisher writes and the sync service serves.

    objects/ab/<id>.full            one slab, whole
    objects/ab/<id>.delta.<base>    the same slab as a difference to another
    metadata/                       signed TUF metadata; timestamp.json is replaced last
    targets/releases/<model>/...    manifests, desired/...: desired state; names carry their digest

Files appear whole or not at all (temporary name, fsync, rename) and objects never change, so any web server can serve
the same folder. Temporary files that a crash left behind have names that nobody asks for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from common.errors import StoreBusy

TIMESTAMP: Final = "metadata/timestamp.json"


class Store:
    """Reads and writes by name; knows nothing of what the bytes mean."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._unsynced: set[Path] = set()

    # --- slab objects ---

    def put_full(self, slab: str, data: bytes) -> bool:
        return self._create(self._object(slab, "full"), data)

    def put_delta(self, slab: str, base: str, data: bytes) -> bool:
        return self._create(self._object(slab, f"delta.{base}"), data)

    def drop_full(self, slab: str) -> None:
        """Takes a damaged object out, so that it can be written anew."""
        self._object(slab, "full").unlink(missing_ok=True)

    def full(self, slab: str) -> bytes | None:
        return _read(self._object(slab, "full"))

    def smallest(self, slab: str, bases: tuple[str, ...]) -> bytes | None:
        """The smallest object from which a holder of `bases` gets the slab; None when the slab is unknown."""
        names = [f"delta.{base}" for base in bases] + ["full"]
        found = [(size, name) for name in names if (size := self._size(slab, name)) is not None]
        return _read(self._object(slab, min(found)[1])) if found else None

    def full_bytes(self, slab: str) -> int | None:
        return self._size(slab, "full")

    def delta_bytes(self, slab: str, base: str) -> int | None:
        return self._size(slab, f"delta.{base}")

    # --- signed files ---

    def read(self, name: str) -> bytes | None:
        """A file under ``metadata/`` or ``targets/``; None when there is none, or the name leads elsewhere."""
        parts = name.split("/")
        if parts[0] not in ("metadata", "targets") or len(parts) < 2 or not all(map(_is_plain, parts)):
            return None
        return _read(self.root.joinpath(*parts))

    def replace(self, name: str, data: bytes) -> None:
        """Writes a signed file durably, over an older one of that name."""
        path = self.root / name
        _write(path, data)
        self._unsynced |= {path.parent, path.parent.parent}

    def sync(self) -> None:
        """Makes every name created so far durable: what is signed next may refer to it."""
        for folder in sorted(self._unsynced):
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
        _write(path, data)
        self._unsynced |= {path.parent, path.parent.parent}
        return True

    def _object(self, slab: str, kind: str) -> Path:
        return self.root / "objects" / slab[:2] / f"{slab}.{kind}"

    def _size(self, slab: str, kind: str) -> int | None:
        try:
            return self._object(slab, kind).stat().st_size
        except FileNotFoundError:
            return None


@contextlib.contextmanager
def folder_lock(path: Path, wait_s: float) -> Iterator[None]:
    """Holds an advisory lock on a file; it goes with the process. Raises `StoreBusy` after `wait_s`."""
    end = time.monotonic() + wait_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() >= end:
                    raise StoreBusy(str(path), wait_s) from exc
                time.sleep(0.02)
        yield


def sync_folder(folder: Path) -> None:
    """fsync of a folder: makes renames in it durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Whole and durable, or not there."""
    _write(path, data)
    sync_folder(path.parent)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".tmp-{secrets.token_hex(8)}"
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as exc:  # a full disk does not say which file it was
        temporary.unlink(missing_ok=True)
        raise OSError(exc.errno, exc.strerror, str(path)) from exc
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None


def _is_plain(part: str) -> bool:
    is_name = part.isascii() and part.isprintable() and "\\" not in part
    return is_name and 0 < len(part) <= 255 and not part.startswith(".")
