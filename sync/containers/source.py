"""A file's headers, by pread: never the file itself in memory, and never more work than a budget of reads.

Whoever reads past the end, or oftener than any sane file needs, gets `Malformed`. A `Cursor` reads one thing after the
other (GGUF, zip directories); ONNX, which nests, asks by position.
"""

from __future__ import annotations

import os
import struct
from typing import Any, Final

from sync.containers.layout import Malformed

WINDOW_BYTES: Final = 32 << 10
MAX_READS: Final = 1 << 22


class Source:
    """`size` bytes of an open file."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._fd = fd
        self._reads_left = MAX_READS
        self._window = b""
        self._start = 0

    def read(self, at: int, length: int) -> bytes:
        """Exactly `length` bytes at `at`, where neighbours will be asked for next."""
        start = at - self._start
        if start < 0 or start + length > len(self._window):
            self._window, self._start, start = self.fetch(at, max(length, WINDOW_BYTES), at_least=length), at, 0
        self._spend()
        return self._window[start : start + length]

    def fetch(self, at: int, length: int, *, at_least: int | None = None) -> bytes:
        """The same without a window around it; `at_least` lets the end of the file cut it short."""
        self._spend()
        least = length if at_least is None else at_least
        if least > self.size - at:
            raise Malformed
        data = os.pread(self._fd, min(length, self.size - at), at)
        if len(data) < least:
            raise Malformed
        return data

    def _spend(self) -> None:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise Malformed


class Cursor:
    """Reads a `Source` from `at` on; `at` is where the next thing begins."""

    def __init__(self, source: Source, at: int = 0) -> None:
        self.at = at
        self._source = source

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))

    def take(self, length: int) -> bytes:
        data = self._source.read(self.at, length)
        self.at += length
        return data

    def skip(self, length: int) -> None:
        if length > self._source.size - self.at:
            raise Malformed
        self.at += length
