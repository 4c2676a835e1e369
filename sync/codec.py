"""How a slab is stored: an object = a header and a payload, in one of the forms `full`, `same` and `planes`.

    full     byte planes of the raw bytes, zstd
    same     no payload: the slab equals its base
    planes   element-wise difference to the base (modulo 2^bits), zigzag, byte planes, zstd; floating-point bit
             patterns are first mapped so that neighbouring numbers are neighbouring integers

Header (format 1, little-endian, 88 bytes): magic "OSLB", format u8, form u8, element width u8, flags u8 (1: floating
point), raw length u64, payload length u64, base id (32 bytes, zero without a base), BLAKE3 of the payload (32 bytes).
A decoder checks the payload's hash before it parses and the raw bytes' id after; output never passes the length that
the release declares.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from common.errors import CorruptSlab
from sync.slabs import MAX_SLAB_BYTES, slab_id

FORMAT: Final = 1
MAGIC: Final = b"OSLB"
FULL, SAME, PLANES = 1, 2, 3
FORM_NAMES: Final = {FULL: "full", SAME: "same", PLANES: "planes"}
FULL_LEVEL: Final = 3  # a full object is mostly incompressible mantissas: a higher level buys nothing
DELTA_LEVEL: Final = 9

_HEADER: Final = struct.Struct("<4sBBBBQQ32s32s")
HEADER_BYTES: Final = _HEADER.size
_NO_BASE: Final = bytes(32)

Words = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What an object says about itself; not to be believed before `decode` has proven it."""

    form: int
    width: int
    is_float: bool
    raw_length: int
    payload_length: int
    base: str | None
    payload_hash: bytes

    @property
    def form_name(self) -> str:
        return FORM_NAMES[self.form]


def max_object_bytes(raw_length: int) -> int:
    """The longest object that a slab of `raw_length` bytes can have (zstd's bound for incompressible data)."""
    return HEADER_BYTES + raw_length + (raw_length >> 7) + 1024


def encode_full(raw: bytes, width: int) -> bytes:
    return _object(FULL, width, False, len(raw), None, _compress(_to_planes(raw, width), FULL_LEVEL))


def encode_delta(raw: bytes, base: bytes, width: int, *, is_float: bool) -> bytes:
    """`raw` and `base` have the same length, a multiple of `width`."""
    if len(raw) != len(base):
        raise ValueError(f"a delta needs slabs of one length, got {len(raw)} and {len(base)}")
    if raw == base:
        return _object(SAME, width, is_float, len(raw), slab_id(base), b"")
    step = _words(raw, width, is_float) - _words(base, width, is_float)  # unsigned: wraps modulo 2^bits
    payload = _compress(_to_planes(_zigzag(step).tobytes(), width), DELTA_LEVEL)
    return _object(PLANES, width, is_float, len(raw), slab_id(base), payload)


def read_header(data: bytes, slab: str) -> Header:
    """Parses and checks everything that a header alone can show. Raises `CorruptSlab`."""
    if len(data) < HEADER_BYTES:
        raise CorruptSlab(slab, f"object of {len(data)} bytes, a header has {HEADER_BYTES}")
    magic, format_, form, width, flags, raw_length, payload_length, base, digest = _HEADER.unpack_from(data)
    if magic != MAGIC or format_ != FORMAT:
        raise CorruptSlab(slab, f"not a slab object of format {FORMAT}")
    if form not in FORM_NAMES or width not in (1, 2, 4, 8) or flags > 1:
        raise CorruptSlab(slab, f"unknown form {form}, width {width} or flags {flags}")
    if raw_length > MAX_SLAB_BYTES or raw_length % width or payload_length != len(data) - HEADER_BYTES:
        raise CorruptSlab(slab, "lengths in the header are wrong")
    if (form == FULL) != (base == _NO_BASE) or (form == SAME and payload_length):
        raise CorruptSlab(slab, f"form {FORM_NAMES[form]} with the wrong base or payload")
    return Header(
        form=form,
        width=width,
        is_float=bool(flags),
        raw_length=raw_length,
        payload_length=payload_length,
        base=None if form == FULL else base.hex(),
        payload_hash=digest,
    )


def decode(data: bytes, *, slab: str, length: int, base: bytes | None = None) -> bytes:
    """The raw bytes of `slab`, which has `length` bytes. `base` is needed for a delta. Raises `CorruptSlab`."""
    header = read_header(data, slab)
    if header.raw_length != length:
        raise CorruptSlab(slab, f"declares {header.raw_length} raw bytes, the release says {length}")
    payload = memoryview(data)[HEADER_BYTES:]
    if blake3(payload).digest() != header.payload_hash:
        raise CorruptSlab(slab, "payload hash does not match")
    raw = _undo(header, payload, slab, base)
    if slab_id(raw) != slab:
        raise CorruptSlab(slab, "decoded bytes do not have the slab's id")
    return raw


def _undo(header: Header, payload: memoryview, slab: str, base: bytes | None) -> bytes:
    if header.form == FULL:
        return _from_planes(_decompress(payload, header.raw_length, slab), header.width)
    if base is None or len(base) != header.raw_length:
        raise CorruptSlab(slab, f"its base {header.base} is not here")
    if header.form == SAME:
        return base
    folded = _from_planes(_decompress(payload, header.raw_length, slab), header.width)
    step = _unzigzag(np.frombuffer(folded, dtype=f"<u{header.width}"))
    words = _words(base, header.width, header.is_float) + step
    return (_monotone(words) if header.is_float else words).tobytes()


def _object(form: int, width: int, is_float: bool, length: int, base: str | None, payload: bytes) -> bytes:
    base_id = _NO_BASE if base is None else bytes.fromhex(base)
    digest = blake3(payload).digest()
    return _HEADER.pack(MAGIC, FORMAT, form, width, is_float, length, len(payload), base_id, digest) + payload


# --- words ---


def _words(raw: bytes, width: int, is_float: bool) -> Words:
    words: Words = np.frombuffer(raw, dtype=f"<u{width}")
    return _monotone(words) if is_float else words


def _monotone(words: Words) -> Words:
    """Bit patterns of floats <-> integers in the floats' order (its own inverse): flip the lower bits of negatives."""
    bits = 8 * words.itemsize
    sign = words.view(f"<i{words.itemsize}") >> (bits - 1)
    flipped: Words = words ^ (sign.view(words.dtype) & words.dtype.type((1 << (bits - 1)) - 1))
    return flipped


def _zigzag(step: Words) -> Words:
    """Small differences of either sign become small unsigned numbers."""
    sign = step.view(f"<i{step.itemsize}") >> (8 * step.itemsize - 1)
    return (step << 1) ^ sign.view(step.dtype)


def _unzigzag(folded: Words) -> Words:
    step: Words = (folded >> 1) ^ (0 - (folded & 1)).astype(folded.dtype)
    return step


# --- byte planes and zstd ---


def _to_planes(raw: bytes, width: int) -> bytes:
    """All first bytes of the elements, then all second bytes, and so on."""
    return raw if width == 1 else np.frombuffer(raw, np.uint8).reshape(-1, width).T.tobytes()


def _from_planes(planes: bytes, width: int) -> bytes:
    return planes if width == 1 else np.frombuffer(planes, np.uint8).reshape(width, -1).T.tobytes()


def _compress(data: bytes, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)


def _decompress(payload: memoryview, length: int, slab: str) -> bytes:
    """Exactly `length` bytes: the frame has to declare them before anything is decompressed."""
    try:
        if zstandard.get_frame_parameters(payload).content_size != length:
            raise CorruptSlab(slab, "compressed frame declares another length")
        decoder = zstandard.ZstdDecompressor(max_window_size=2 * MAX_SLAB_BYTES)
        data = decoder.decompress(payload, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise CorruptSlab(slab, f"compressed frame is damaged: {exc}") from exc
    if len(data) != length:
        raise CorruptSlab(slab, "compressed frame is short")
    return data
