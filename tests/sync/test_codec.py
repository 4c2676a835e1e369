from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CorruptSlab
from sync import codec
from sync.slabs import slab_id

WIDTHS = st.sampled_from([1, 2, 4, 8])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes, int, bool]:
    """(raw, base, width, is_float), of one length."""
    width = draw(WIDTHS)
    length = width * draw(st.integers(0, 40))
    return (
        draw(st.binary(min_size=length, max_size=length)),
        draw(st.binary(min_size=length, max_size=length)),
        width,
        draw(st.booleans()),
    )


@given(pair=pairs())
def test_full_and_delta_give_the_same_bytes_back(pair: tuple[bytes, bytes, int, bool]) -> None:
    raw, base, width, is_float = pair
    full = codec.encode_full(raw, width)
    delta = codec.encode_delta(raw, base, width, is_float=is_float)
    assert codec.decode(full, slab=slab_id(raw), length=len(raw)) == raw
    assert codec.decode(delta, slab=slab_id(raw), length=len(raw), base=base) == raw
    assert codec.read_header(delta, "x").base == slab_id(base)


@given(pair=pairs(), at=st.integers(0, 10_000), bit=st.integers(0, 7), is_delta=st.booleans())
def test_a_flipped_bit_never_gives_other_bytes(
    pair: tuple[bytes, bytes, int, bool], at: int, bit: int, is_delta: bool
) -> None:
    raw, base, width, is_float = pair
    data = bytearray(
        codec.encode_delta(raw, base, width, is_float=is_float) if is_delta else codec.encode_full(raw, width)
    )
    data[at % len(data)] ^= 1 << bit
    with contextlib.suppress(CorruptSlab):
        assert codec.decode(bytes(data), slab=slab_id(raw), length=len(raw), base=base) == raw


@given(data=st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptSlab):
        codec.decode(data, slab="0" * 64, length=8, base=bytes(8))


def test_an_unchanged_slab_has_no_payload() -> None:
    raw = bytes(range(256))
    data = codec.encode_delta(raw, raw, 4, is_float=True)
    assert (len(data), codec.read_header(data, "x").form_name) == (codec.HEADER_BYTES, "same")


def test_neighbouring_floats_differ_by_one_even_across_zero() -> None:
    """-tiny, -0, 0, tiny are neighbours on the number line, and have to be small differences."""
    tiny = np.nextafter(np.float32(0), np.float32(1))
    line = np.array([-tiny, -0.0, 0.0, tiny, np.nextafter(tiny, np.float32(1))], np.float32)
    order = codec._monotone(line.view("<u4")).view("<i4")
    assert np.diff(order).tolist() == [1, 1, 1, 1]


def test_the_monotone_mapping_keeps_nan_payloads() -> None:
    raw = struct.pack("<4I", 0x7FC00001, 0xFFC12345, 0x7F800000, 0xFF800000)
    data = codec.encode_delta(raw, bytes(16), 4, is_float=True)
    assert codec.decode(data, slab=slab_id(raw), length=16, base=bytes(16)) == raw


def test_a_small_step_is_far_smaller_than_the_whole() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=50_000).astype(np.float32)
    raw = (base * np.float32(1 + 1e-6)).astype(np.float32)
    delta = codec.encode_delta(raw.tobytes(), base.tobytes(), 4, is_float=True)
    assert len(delta) < len(codec.encode_full(raw.tobytes(), 4)) / 4


def test_output_is_capped_by_the_declared_size() -> None:
    """A frame that would unpack to a gigabyte is refused before it is unpacked."""
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))
    for raw_length in (64, 1 << 20):
        head = codec._HEADER.pack(
            codec.MAGIC, 1, codec.FULL, 1, 0, raw_length, len(bomb), bytes(32), blake3(bomb).digest()
        )
        with pytest.raises(CorruptSlab, match="another length"):
            codec.decode(head + bomb, slab="0" * 64, length=raw_length)


def test_a_frame_without_a_declared_size_is_refused() -> None:
    payload = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64))
    head = codec._HEADER.pack(codec.MAGIC, 1, codec.FULL, 1, 0, 64, len(payload), bytes(32), blake3(payload).digest())
    with pytest.raises(CorruptSlab):
        codec.decode(head + payload, slab=slab_id(bytes(64)), length=64)


def test_right_bytes_under_another_id_are_refused() -> None:
    data = codec.encode_full(b"abcd", 1)
    with pytest.raises(CorruptSlab, match="id"):
        codec.decode(data, slab=slab_id(b"abce"), length=4)


def test_the_wrong_base_is_noticed() -> None:
    data = codec.encode_delta(b"abcd", b"abcc", 1, is_float=False)
    for base in (b"xxxx", b"abc", None):
        with pytest.raises(CorruptSlab):
            codec.decode(data, slab=slab_id(b"abcd"), length=4, base=base)


def test_the_header_is_laid_out_as_documented() -> None:
    data = codec.encode_delta(b"ab", b"aa", 2, is_float=True)
    assert data[:8] == b"OSLB" + bytes([1, 3, 2, 1])
    assert int.from_bytes(data[8:16], "little") == 2
    assert int.from_bytes(data[16:24], "little") == len(data) - 88
    assert data[24:56] == blake3(b"aa").digest()
    assert data[56:88] == blake3(data[88:]).digest()


@given(length=st.integers(0, 5000))
def test_no_object_is_longer_than_a_reader_accepts(length: int) -> None:
    raw = np.random.default_rng(length).bytes(length)
    assert len(codec.encode_full(raw, 1)) <= codec.max_object_bytes(length)
