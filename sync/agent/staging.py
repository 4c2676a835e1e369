"""The folder where a release is put together: its files at their full size, filled slab by slab, one writer at a time.

The lock lies beside the folder, named after the release's digest, and goes with the process that holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from common.errors import BadRelease, FetchCancelled, FetchError
from sync.agent.files import OpenFiles
from sync.agent.local import file_hash
from sync.disk import sync_folder
from sync.release import FileEntry, Manifest, SlabEntry
from sync.slabs import read_pieces, slab_id, write_pieces

PARTIALS: Final = ".fetch"  # folder in it that is not part of the release


class Staging:
    """`folder` on its way to holding the files `paths` of a release."""

    def __init__(self, folder: Path, manifest: Manifest, paths: Sequence[str], cancelled: Callable[[], bool]) -> None:
        self._folder, self._manifest, self._cancelled = folder, manifest, cancelled
        self._files = [file for file in manifest.files if file.path in set(paths)]
        self._open = OpenFiles(os.O_RDWR)
        self._paths = {file.path: str(folder / file.path) for file in self._files}
        self._places: dict[str, list[tuple[FileEntry, SlabEntry]]] = {}
        for file in self._files:
            for slab in file.slabs:
                self._places.setdefault(slab.id, []).append((file, slab))

    @property
    def partials(self) -> Path:
        return self._folder / PARTIALS

    def slabs(self) -> Iterator[SlabEntry]:
        """Each once."""
        return (places[0][1] for places in self._places.values())

    def places(self, slab: str) -> Sequence[tuple[FileEntry, SlabEntry]]:
        """Where it belongs."""
        return self._places[slab]

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Locked, and with its files as long as they will be. A `FetchError` when another process has it."""
        with _locked(self._folder.parent / f"{self._manifest.digest()}.lock", self._manifest.name):
            try:
                self._make_files()
                yield
            finally:
                self._open.close()

    def holds(self, slab: str) -> bool:
        """All places of the slab have it already: an earlier try got this far."""
        return all(
            slab_id(read_pieces(self._open.fd(self._paths[file.path]), entry.pieces)) == slab
            for file, entry in self._places[slab]
        )

    def write(self, slab: str, raw: bytes) -> None:
        for file, entry in self._places[slab]:
            write_pieces(self._open.fd(self._paths[file.path]), entry.pieces, raw)

    def finish(self) -> None:
        """Every file's hash, then its bytes on the disk. Raises `BadRelease`."""
        for file in self._files:
            path = self._folder / file.path
            if file_hash(path, self._check) != file.digest:
                problem = f"file {file.path}: its slabs do not give the hash that the manifest declares"
                raise BadRelease(self._manifest.name, problem)
            os.fsync(self._open.fd(str(path)))
        for folder in {self._folder / parent for file in self._files for parent in Path(file.path).parents}:
            sync_folder(folder)

    def _check(self) -> None:
        if self._cancelled():
            raise FetchCancelled(self._manifest.name)

    def _make_files(self) -> None:
        names = {self._folder / file.path for file in self._files}
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.rglob("*"):
            if path not in names and not path.is_dir() and path.parent != self.partials:
                path.unlink()  # of an earlier try, when the node took another variant
        for file in self._files:
            path = self._folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as one:
                one.truncate(file.size)


@contextlib.contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Holds the lock file `path`, which says who has it, and takes it away at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = _locked_fd(path, name)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _locked_fd(path: Path, name: str) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == os.fstat(fd).st_ino:
                    return fd
        except BlockingIOError as exc:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace") or "another"
            os.close(fd)
            raise FetchError(f"release {name}", f"process {holder} is putting it together just now") from exc
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # whoever had it took it away meanwhile
