"""Where the agent goes on when its disk takes no writes: a folder in memory that begins as a copy of what serves.

What is fetched there is gone with the process, which then begins again from the disk. Versions are as large there as on
a disk, so at most half of what is free of the memory's file system is taken for the copy.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Final

from common.errors import OutriderError
from sync.agent.journal import Journal, journal_copy

_log = logging.getLogger(__name__)
_MEMORY: Final = Path("/dev/shm")  # noqa: S108  # a private folder is made in it
_SHARE: Final = 0.5


@contextlib.contextmanager
def memory_folder(disk: Path) -> Iterator[Path | None]:
    """A folder that goes on from what `disk` has; None where there is no memory for it, or nothing to go on from."""
    prefix = f"outrider-{blake2b(str(disk.absolute()).encode(), digest_size=8).hexdigest()}-"
    if not _MEMORY.is_dir():
        yield None
        return
    _clear(prefix)  # of a process that was killed
    with tempfile.TemporaryDirectory(prefix=prefix, dir=_MEMORY) as name:
        folder = Path(name)
        try:
            _copy(disk, folder)
        except (OutriderError, OSError) as exc:
            _log.error("%s cannot go on in memory: %s", disk, exc)
            yield None
            return
        yield folder


def _copy(disk: Path, folder: Path) -> None:
    """What serves, the journal that says so, and the metadata under which it was believed."""
    with journal_copy(disk) as copy:
        for path in copy.parent.iterdir():
            shutil.copyfile(path, folder / path.name)
    if (disk / "tuf").is_dir():
        shutil.copytree(disk / "tuf", folder / "tuf", symlinks=True)
    with contextlib.closing(Journal(folder / "journal.db")) as journal:
        records = [record for record in journal.records() if record.active is not None]
        kept = {record.model: disk / "models" / record.model / str(record.active) for record in records}
        needed = sum(path.stat().st_size for one in kept.values() for path in one.rglob("*") if path.is_file())
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        if needed > _SHARE * free:
            raise OSError(f"what serves has {needed} bytes, {free} are free of {_MEMORY}")
        for record in records:
            journal.save(replace(record, previous=None))
            journal.forget_releases(record.model, {str(record.active)})
            shutil.copytree(kept[record.model], folder / "models" / record.model / str(record.active))


def _clear(prefix: str) -> None:
    for path in _MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and not path.is_symlink():
                shutil.rmtree(path)
