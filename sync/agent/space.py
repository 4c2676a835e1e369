"""Space for a release, taken before anything is fetched: a disk that is too small is found then, not half-way.

Every file of the release is allocated in the staging folder at its full size, and some room is left for the journal.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from common.errors import NoSpace
from sync.release import FileEntry

SPARE_BYTES: Final = 1 << 20  # stays free: the journal and copies of metadata grow a little


def reserve(folder: Path, files: Iterable[FileEntry]) -> None:
    """Allocates `files` in `folder`; what is there already counts. Raises `NoSpace`, and leaves what it could get."""
    needed = 0
    try:
        for file in files:
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            needed += file.size
            _allocate(path, file.size)
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NoSpace(str(folder), needed, _free(folder)) from exc
    if _free(folder) < SPARE_BYTES:
        raise NoSpace(str(folder), SPARE_BYTES, _free(folder))


def _allocate(path: Path, size: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if os.fstat(fd).st_size > size:
            os.ftruncate(fd, size)
        if size:
            os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
