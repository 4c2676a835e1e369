"""What zstd alone makes of a file: whole, and as a patch to another. What `outrider sync diff` compares itself with.

A patch is counted as `zstd --patch-from` finds it: the new file behind the base, with long-distance matching in a
window over both: within 0.5 % of `zstd --single-thread --patch-from`. (Its default, a worker thread, finds far less; so
does a dictionary of the base, of which zstd keeps no long-distance table.)
"""

from __future__ import annotations

import os
from typing import Final

import zstandard

MAX_PATCH_BYTES: Final = 1 << 30  # of both files: the window has to hold them
_LEVEL: Final = 3
_CHUNK: Final = 1 << 20
_MIN_WINDOW_LOG: Final = 20


def compressed_bytes(fd: int) -> int:
    """As `zstd -3`."""
    stream = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
    return _fed(stream, fd) + len(stream.flush())


def patch_bytes(fd: int, base_fd: int) -> int | None:
    """As `zstd -3 --single-thread --patch-from`; None where the files are too large for it."""
    size = os.fstat(fd).st_size + os.fstat(base_fd).st_size
    if size > MAX_PATCH_BYTES:
        return None
    window_log = max(size.bit_length(), _MIN_WINDOW_LOG)
    parameters = zstandard.ZstdCompressionParameters.from_level(_LEVEL, window_log=window_log, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    _fed(stream, base_fd)
    stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return _fed(stream, fd) + len(stream.flush())


def _fed(stream: zstandard.ZstdCompressionObj, fd: int) -> int:
    """Compresses a whole file into the stream; the bytes that came out meanwhile."""
    total = at = 0
    while chunk := os.pread(fd, _CHUNK, at):
        total += len(stream.compress(chunk))
        at += len(chunk)
    return total
