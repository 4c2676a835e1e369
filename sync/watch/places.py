"""Where a trainer writes: a folder, or a prefix of an S3 bucket. Looks, reads small files and copies large ones."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final, Protocol

from common.errors import CheckpointRefused, ConfigError
from sync.watch.watch import MAX_TEXT_BYTES, Look, Seen

_CHUNK: Final = 8 << 20
_TIMEOUT_S: Final = 60.0


class Place(Protocol):
    """Raises `OSError`, `BucketError`, or `CheckpointRefused` where a file is not what it was when it was looked at."""

    def look(self) -> Look: ...

    def text(self, name: str) -> str:
        """A small file; of a link, where it leads."""
        ...

    def copy(self, name: str, seen: Seen, to: Path) -> None: ...


def place_of(address: str) -> Place:
    """Raises `ConfigError` where there is no such folder, or the address is none."""
    if address.startswith("s3://"):
        return BucketPlace(address)
    if not Path(address).is_dir():
        raise ConfigError("sync watch", "SOURCE", f"{address} is not there", "a folder, or s3://BUCKET[/PREFIX]")
    return FolderPlace(Path(address))


class FolderPlace:
    def __init__(self, root: Path) -> None:
        self._root = root

    def look(self) -> Look:
        found = {}
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = Path(folder) / name
                try:
                    status = path.stat()
                except FileNotFoundError:  # gone meanwhile, or a link to nowhere
                    continue
                if stat.S_ISREG(status.st_mode):
                    found[path.relative_to(self._root).as_posix()] = _seen(status)
        for path in self._root.iterdir():
            if path.is_symlink() and path.is_dir():  # `latest` as a link to a folder
                found[path.name] = Seen(size=0, changed=path.lstat().st_mtime)
        return found

    def text(self, name: str) -> str:
        path = self._root / name
        if path.is_symlink():
            target = Path(os.path.normpath(path.parent / path.readlink()))
            return target.relative_to(self._root).as_posix() if target.is_relative_to(self._root) else str(target)
        with path.open("rb") as file:
            return _decoded(name, file.read(MAX_TEXT_BYTES + 1))

    def copy(self, name: str, seen: Seen, to: Path) -> None:
        with (self._root / name).open("rb") as file, to.open("wb") as out:
            while data := file.read(_CHUNK):
                out.write(data)
            after = _seen((self._root / name).stat())
        if after != seen or to.stat().st_size != seen.size:
            raise CheckpointRefused(name, "was written to while it was being copied")


class BucketPlace:
    """Objects in a bucket are there whole or not at all; of a checkpoint in several the rest may be missing."""

    def __init__(self, address: str) -> None:
        from sync.store.bucket import Bucket

        self._bucket = Bucket(address, timeout_s=_TIMEOUT_S)

    def look(self) -> Look:
        return {name: Seen(size=size, changed=changed) for name, size, changed in self._bucket.names("")}

    def text(self, name: str) -> str:
        found = self._bucket.get(name, length=MAX_TEXT_BYTES + 1)
        return _decoded(name, b"" if found is None else found.data)

    def copy(self, name: str, seen: Seen, to: Path) -> None:
        found = self._bucket.stream(name)
        size = 0
        if found is not None:
            with to.open("wb") as out:
                size = sum(out.write(chunk) for chunk in found.chunks)
        if found is None or size != seen.size:
            raise CheckpointRefused(name, "was replaced or taken away while it was being copied")


def _seen(status: os.stat_result) -> Seen:
    return Seen(size=status.st_size, changed=status.st_mtime_ns / 1e9)


def _decoded(name: str, data: bytes) -> str:
    if len(data) > MAX_TEXT_BYTES:
        raise CheckpointRefused(name, f"has more than {MAX_TEXT_BYTES} bytes, which no index has")
    return data.decode("utf-8", "replace")
