"""Files with a private key or a token: mode 0600, whole and durable or not there, refused where others can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from common.errors import ConfigError
from sync.disk import sync_folder


def write_private(path: Path, data: bytes) -> None:
    """Replaces the file; what was there stays until the new one is on the disk."""
    temporary = path.parent / f".tmp-{secrets.token_hex(8)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_private(path: Path, what: str) -> bytes:
    """Raises `ConfigError` where it is missing or open to others; `what` it is stands in the error."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigError(what, str(path), "can be read by others", "a file of mode 0600")
            return file.read()
    except OSError as exc:
        raise ConfigError(what, str(path), f"cannot be read: {exc.strerror}", "a readable file") from exc


def private_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
