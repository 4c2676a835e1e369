"""What has come of ranges whose rest is still to come: a file for each, written as the bytes come in.

Nothing of it is believed: whoever completes a range holds it against its hash. It is not synced either; what a power
cut leaves of it is as good as any other wrong byte.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final

from blake3 import blake3

from sync.agent.ports import Range

_NAME_BYTES: Final = 16


class Partials:
    """The files are named after their ranges. Bytes are added to one range at a time; it is in memory too."""

    def __init__(self, folder: Path) -> None:
        """What an earlier try left in `folder` counts."""
        self._folder, self._sizes = folder, _sizes(folder)
        self._name, self._fd, self._data = "", -1, bytearray()

    def bytes_of(self, one: Range) -> int:
        """How much of it is here."""
        size = self._sizes.get(_name(one), 0) if self._sizes else 0
        if size > one.most:
            self.forget(one)
            return 0
        return size

    def add(self, one: Range, data: bytes) -> None:
        self._open(one)
        self._data += data
        self._sizes[self._name] = len(self._data)
        if self._fd >= 0:
            try:
                _write(self._fd, data)
            except OSError:  # a full disk costs what could have been resumed, not the release: there is room for that
                self._give_up_file()

    def take(self, one: Range, last: bytes = b"", *, keeps: bool = False) -> bytes:
        """All of the range, of which `last` just came. `keeps`: it will be asked for again by the next try."""
        if not keeps and not self.bytes_of(one):
            return last
        if last and keeps:
            self.add(one, last)
        self._open(one)
        data = bytes(self._data) if keeps else bytes(self._data) + last
        if not keeps:
            self.forget(one)
        return data

    def forget(self, one: Range) -> None:
        name = _name(one)
        if name == self._name:
            self.close()
        if self._sizes.pop(name, None) is not None:
            (self._folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """The files stay."""
        if self._fd >= 0:
            os.close(self._fd)
        else:
            self._sizes.pop(self._name, None)
        self._name, self._fd, self._data = "", -1, bytearray()

    def remove(self) -> None:
        """And here they go: everything is where it belongs."""
        self.close()
        self._sizes.clear()
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def _open(self, one: Range) -> None:
        name = _name(one)
        if name == self._name:
            return
        self.close()
        self._name, path = name, self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self._data = bytearray(os.pread(self._fd, one.most, 0))
        except OSError:
            self._give_up_file()
        self._sizes[name] = len(self._data)

    def _give_up_file(self) -> None:
        """The range that is being added to is in memory alone."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(OSError):
            (self._folder / self._name).unlink()


def _name(one: Range) -> str:
    return blake3(f"{one.name} {one.offset} {one.length}".encode()).hexdigest(_NAME_BYTES)


def _sizes(folder: Path) -> dict[str, int]:
    try:
        return {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
    except FileNotFoundError:
        return {}


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
