"""Forms that need nothing but zstd (full, same, sparse, planes), and the header. `ctx`: tests/sync/codec."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CorruptSlab
from sync import codec
from sync.codec import Encoded, Header
from sync.codec.words import monotone
from sync.slabs import slab_id

KINDS = st.sampled_from(sorted(codec.KINDS))
HASH = b"h" * 8


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes, int, int]:
    """(raw, base, width, mantissa), of one length; most elements may be equal."""
    width, mantissa = draw(KINDS)
    count = draw(st.integers(1, 40))
    raw = draw(st.binary(min_size=width * count, max_size=width * count))
    base = bytearray(raw)
    for at in draw(st.lists(st.integers(0, count - 1), max_size=count)):
        base[at * width : (at + 1) * width] = draw(st.binary(min_size=width, max_size=width))
    return raw, bytes(base), width, mantissa


def differences(raw: bytes, base: bytes, width: int, mantissa: int) -> list[Encoded]:
    """In every form of this file."""
    if raw == base:
        return [codec.encode_same(raw, width, mantissa)]
    found = [
        codec.encode_planes(raw, base, width, mantissa, base_id=slab_id(base)),
        codec.encode_sparse(raw, base, width, mantissa, base_id=slab_id(base)),
    ]
    return [one for one in found if one is not None]


def lie(payload: bytes, **fields: int) -> tuple[Header, bytes]:
    """A `full` of 64 zero bytes whose payload is something else, with the right hash."""
    header = codec.encode_full(bytes(64), 1).header
    changes = {"payload_length": len(payload), "payload_hash": codec.payload_hash(payload), **fields}
    return replace(header, **changes), payload  # type: ignore[arg-type]


@given(pair=pairs())
def test_every_form_gives_the_same_bytes_back(pair: tuple[bytes, bytes, int, int]) -> None:
    raw, base, width, mantissa = pair
    full = codec.encode_full(raw, width, mantissa)
    assert codec.decode_object(full.to_object(), slab=slab_id(raw), length=len(raw)) == raw
    for one in differences(*pair):
        assert codec.decode(one.header, one.payload, base=base) == raw
        assert (one.header.base, one.header.slab) == (slab_id(base), slab_id(raw))
        assert codec.parse_header(one.header.to_bytes()) == one.header


@given(pair=pairs(), at=st.integers(0, 10_000), bit=st.integers(0, 7), number=st.integers(0, 2))
def test_a_flipped_bit_never_gives_other_bytes(
    pair: tuple[bytes, bytes, int, int], at: int, bit: int, number: int
) -> None:
    """Neither in the header nor in the payload; in the payload it is always noticed."""
    raw, base, width, mantissa = pair
    forms = [codec.encode_full(raw, width, mantissa), *differences(*pair)]
    one = forms[number % len(forms)]
    data = bytearray(one.header.to_bytes() + one.payload)
    at %= len(data)
    data[at] ^= 1 << bit
    with contextlib.suppress(CorruptSlab):
        header = codec.parse_header(bytes(data))
        decoded = codec.decode(header, bytes(data[codec.HEADER_BYTES :]), base=base)
        assert at < codec.HEADER_BYTES
        assert slab_id(decoded) == header.slab


@given(data=st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptSlab):
        codec.decode_object(data, slab="0" * 64, length=8)
    with pytest.raises(CorruptSlab):
        codec.decode_object(codec.encode_full(bytes(8), 1).to_object()[:8] + data, slab="0" * 64, length=8)


def test_an_unchanged_slab_has_no_payload() -> None:
    one = codec.encode_same(bytes(range(256)), 4, 23)
    assert (len(one.payload), one.header.form_name) == (0, "same")


def test_neighbouring_floats_differ_by_one_even_across_zero() -> None:
    """-tiny, -0, 0, tiny are neighbours on the number line, and have to be small differences."""
    tiny = np.nextafter(np.float32(0), np.float32(1))
    line = np.array([-tiny, -0.0, 0.0, tiny, np.nextafter(tiny, np.float32(1))], np.float32)
    order = monotone(line.view("<u4")).view("<i4")
    assert np.diff(order).tolist() == [1, 1, 1, 1]


def test_the_monotone_mapping_keeps_nan_payloads() -> None:
    raw = struct.pack("<4I", 0x7FC00001, 0xFFC12345, 0x7F800000, 0xFF800000)
    for one in differences(raw, bytes(16), 4, 23):
        assert codec.decode(one.header, one.payload, base=bytes(16)) == raw


def test_a_small_step_is_far_smaller_than_the_whole() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=50_000).astype(np.float32)
    raw = (base * np.float32(1 + 1e-6)).astype(np.float32)
    planes = codec.encode_planes(raw.tobytes(), base.tobytes(), 4, 23, base_id="ab" * 32)
    assert len(planes.payload) < len(codec.encode_full(raw.tobytes(), 4).payload) / 4


def test_few_changes_are_smallest_as_a_list() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(-100, 100, 50_000).astype(np.int8)
    raw = base.copy()
    raw[rng.choice(len(raw), 1000, replace=False)] += rng.integers(-8, 9, 1000).astype(np.int8)
    planes, sparse = differences(raw.tobytes(), base.tobytes(), 1, 0)
    assert sparse.header.form_name == "sparse"
    assert len(sparse.payload) < len(planes.payload)
    assert len(sparse.payload) < 2500  # 1,000 gaps of about 50 and 1,000 values of four bits


def test_output_is_capped_by_the_declared_size() -> None:
    """A frame that would unpack to far more is refused before it is unpacked."""
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26))
    for raw_length in (64, 1 << 20):
        header, payload = lie(bomb, raw_length=raw_length)
        with pytest.raises(CorruptSlab, match="another length"):
            codec.decode(header, payload)


def test_a_frame_without_a_declared_size_is_refused() -> None:
    header, payload = lie(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64)))
    with pytest.raises(CorruptSlab):
        codec.decode(header, payload)


def test_right_bytes_under_another_id_are_refused() -> None:
    one = codec.encode_full(b"abcd", 1)
    with pytest.raises(CorruptSlab, match="id"):
        codec.decode(replace(one.header, slab=slab_id(b"abce")), one.payload)
    with pytest.raises(CorruptSlab, match="not 4"):
        codec.decode_object(one.to_object(), slab=slab_id(b"abce"), length=4)


def test_the_wrong_base_is_noticed() -> None:
    for one in differences(b"abcd", b"abcc", 1, 0):
        for base in (b"xxxx", b"abc", None):
            with pytest.raises(CorruptSlab):
                codec.decode(one.header, one.payload, base=base)


def test_a_form_of_later_times_is_read_as_a_header_and_refused_as_a_slab() -> None:
    one = codec.encode_full(b"abcd", 1)
    later = codec.parse_header(replace(one.header, form=77, row=7).to_bytes())
    assert (later.form, later.form_name, later.payload_length) == (77, "form 77", len(one.payload))
    with pytest.raises(CorruptSlab, match="form 77"):
        codec.decode(later, one.payload, base=b"abcd")


def test_only_a_full_stands_alone() -> None:
    same = codec.encode_same(b"abcd", 1, 0)
    with pytest.raises(CorruptSlab, match="stands alone as same"):
        codec.decode_object(same.to_object(), slab=slab_id(b"abcd"), length=4)


@pytest.mark.parametrize(
    "fields",
    [
        {"width": 3},
        {"mantissa": 10},
        {"raw_length": 0},
        {"raw_length": 5},
        {"raw_length": (4 << 20) + 4},
        {"payload_length": 0},
        {"payload_length": 5000},
        {"base": None},
        {"form": codec.SAME},
        {"form": codec.FULL},
        {"form": codec.CTX},
        {"row": 1},
        {"tables": 1},
    ],
    ids=str,
)
def test_a_header_that_contradicts_itself_is_refused(fields: dict[str, int]) -> None:
    good = Header(
        form=codec.PLANES,
        width=4,
        mantissa=23,
        raw_length=64,
        payload_length=10,
        slab="ab" * 32,
        base="cd" * 32,
        payload_hash=HASH,
    )
    assert codec.parse_header(good.to_bytes()) == good
    with pytest.raises(CorruptSlab):
        codec.parse_header(replace(good, **fields).to_bytes())  # type: ignore[arg-type]


def test_the_header_is_laid_out_as_documented() -> None:
    one = codec.encode_planes(b"ab", b"aa", 2, 7, base_id=slab_id(b"aa"))
    data = one.header.to_bytes()
    assert len(data) == 88
    assert data[:4] == bytes([4, 2, 7, 0])
    assert struct.unpack_from("<III", data, 4) == (0, 2, len(one.payload))
    assert data[16:48] == blake3(b"ab").digest()
    assert data[48:80] == blake3(b"aa").digest()
    assert data[80:] == blake3(one.payload).digest()[:8]
    full = codec.encode_full(b"ab", 2)
    assert full.to_object() == b"OSLB" + bytes([1, 0, 0, 0]) + full.header.to_bytes() + full.payload
    assert full.header.to_bytes()[48:80] == bytes(32)


@given(length=st.integers(1, 5000))
def test_no_object_is_longer_than_a_reader_accepts(length: int) -> None:
    raw = np.random.default_rng(length).bytes(length)
    assert len(codec.encode_full(raw, 1).to_object()) <= codec.max_object_bytes(length)
