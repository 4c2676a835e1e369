"""How a manifest travels. What is signed is plain JSON; beside it lie shorter ways to it, which nobody signs:

    <name>.<base>.zst    to whoever has another manifest: `base` is the first 16 hex digits of its BLAKE3
    <name>.zst           to everybody else

Both are one zstd frame, the first with the other manifest as its dictionary (raw content). From one release to the next
little but the ids of changed slabs is left. Whoever unpacks checks length and hash of the result, as signed.
"""

from __future__ import annotations

from typing import Final

import zstandard
from blake3 import blake3

MAX_MANIFEST_BYTES: Final = 64 << 20

_LEVELS: Final = ((4 << 20, 19), (MAX_MANIFEST_BYTES, 9))  # up to so many bytes; 19 takes a second for 2 MB
_MAX_WINDOW_LOG: Final = 27  # two of the largest manifests


def pack(manifest: bytes, base: bytes = b"") -> bytes:
    """`base`: a manifest that the reader has."""
    size = len(manifest) + len(base)
    level = next((level for most, level in _LEVELS if size <= most), _LEVELS[-1][1])
    window_log = min(max(size.bit_length(), zstandard.WINDOWLOG_MIN), _MAX_WINDOW_LOG)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, window_log=window_log, source_size=size, write_content_size=True
    )
    return zstandard.ZstdCompressor(compression_params=parameters, dict_data=_dictionary(base)).compress(manifest)


def unpack(frame: bytes, base: bytes = b"", *, most: int = MAX_MANIFEST_BYTES) -> bytes:
    """Raises `ValueError`; the frame has to declare its length, which is at most `most`."""
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size > most:
            raise ValueError(f"declares more than {most} bytes, or no length")
        decoder = zstandard.ZstdDecompressor(dict_data=_dictionary(base))
        data = decoder.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise ValueError(f"is damaged: {exc}") from exc
    if len(data) != size:
        raise ValueError(f"has {len(data)} bytes, declared are {size}")
    return data


def packed_name(name: str, base: bytes = b"") -> str:
    return f"{name}.{blake3(base).hexdigest()[:16]}.zst" if base else f"{name}.zst"


def _dictionary(base: bytes) -> zstandard.ZstdCompressionDict | None:
    return zstandard.ZstdCompressionDict(base, dict_type=zstandard.DICT_TYPE_RAWCONTENT) if base else None
