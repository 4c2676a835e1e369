"""Files and folders that are durable when a function returns: written whole, synced, and then given their names."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from common.errors import StoreBusy

TEMPORARY: Final = ".tmp-"  # how the names of files begin that are being written, or that a crash left behind


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
    except OSError as exc:  # it does not say which folder it was
        raise OSError(exc.errno, exc.strerror, str(folder)) from exc
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Whole and durable, or not there."""
    write_file(path, data)
    sync_folder(path.parent)


def write_file(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name, durably, when the block has ended well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as exc:  # a full disk does not say which file it was
        temporary.unlink(missing_ok=True)
        raise OSError(exc.errno, exc.strerror, str(exc.filename or path)) from exc
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_file(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
