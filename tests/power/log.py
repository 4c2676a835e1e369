"""The log that `shim.c` writes: what a process did to the files under one folder, in order, with its own remarks."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

_HEAD: Final = struct.Struct("<IHHHHIQqI")  # total, op, path, path2, flags, pid, inode, offset, data


class Op(IntEnum):
    """As in the enum of `shim.c`."""

    BEGIN = 0  # of a process
    MARK = 1  # what the process itself says
    CREATE = 2
    SIZE = 3  # a file was cut, or made longer
    WRITE = 4
    GROW = 5  # a file has at least this size
    SYNC = 6
    MKDIR = 7
    REMOVE = 8
    RENAME = 9
    SYMLINK = 10
    LINK = 11
    UNKNOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """`path` and `path2` (the new name) are below the folder, "" for itself. `offset`: a size for SIZE and GROW, for
    SYNC the nanoseconds that it took."""

    op: Op
    path: str
    path2: str
    only_data: bool  # fdatasync, not fsync
    inode: int
    offset: int
    data: bytes


def read_log(path: Path) -> Iterator[Entry]:
    """Raises `ValueError` for a call that the shim saw and has no record for."""
    log, at = path.read_bytes(), 0
    while at < len(log):
        total, op, first, second, flags, _, inode, offset, size = _HEAD.unpack_from(log, at)
        name_at = at + _HEAD.size
        data_at = name_at + first + second
        entry = Entry(
            op=Op(op),
            path=log[name_at : name_at + first].decode(),
            path2=log[name_at + first : data_at].decode(),
            only_data=bool(flags),
            inode=inode,
            offset=offset,
            data=log[data_at : data_at + size],
        )
        if entry.op is Op.UNKNOWN:
            raise ValueError(f"a call on {entry.path or entry.path2!r} that this model has no rule for")
        yield entry
        at += total


def build(folder: Path) -> Path | None:
    """The library; None where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    library, source = folder / "shim.so", Path(__file__).with_name("shim.c")
    subprocess.run((compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl", "-lpthread"), check=True)
    return library


def environment(library: Path, folder: Path, log: Path) -> Mapping[str, str]:
    """Of a process whose calls on `folder` are to be logged."""
    return os.environ | {"LD_PRELOAD": str(library), "POWER_FOLDER": str(folder), "POWER_LOG": str(log)}
