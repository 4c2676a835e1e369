"""One process to a state folder: an advisory lock that goes with the process, and says which one it is.

What lies in the folder is its owners' business, also that it cannot be written: then there is no lock, and nothing that
a second process could spoil.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from common.errors import ConfigError


@contextlib.contextmanager
def owned(folder: Path, kind: str) -> Iterator[None]:
    """`folder` for this process (`kind` says what it is) alone. Raises `ConfigError` where another one has it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no folder to write in, or a file system without locks
            folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, fd)
            _lock(fd, folder, kind)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield


def _lock(fd: int, folder: Path, kind: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        holder = f"process {pid}" if pid.isdigit() else "another process"
        problem = f"{folder} is in use by {holder}"
        raise ConfigError(kind, "state_dir", problem, "a folder for each process") from exc
