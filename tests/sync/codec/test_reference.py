"""The reference decoders: payloads worked out by hand, round trips through the reference encoder, hostile input."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.codec.reference import ctx_decode, planes_decode, sparse_decode
from sync.codec.tables import PAIRS, TableSet
from tests.sync.codec.reference_encoder import ctx_encode, difference, token_of
from tests.sync.codec.tablesets import random_tables
from tests.sync.codec.test_tables import BY_HAND, parse_tables

KNOWN = [(1, 0), (1, 2), (1, 3), (2, 0), (2, 7), (2, 10), (4, 0), (4, 23), (8, 0), (8, 52)]

# Base 10 10 | 10 200, rows of 2, classes 0 and 1, with the table set of test_tables (class table after 0: (1, 4095);
# tokens (4094, 1, 1)). New 10 10 | 11 201: both steps are +1, and 200 has its top bit set, so tokens 1 and 2.
# Coding runs backwards, from the state 0x10000:
#   token 2 (f 1, start 4095):    0x10000 x 4096 + 4095 = 0x10000fff
#   token 1 (f 1, start 4094):    0x10000fff >= 2^20, so the word 0x0fff goes out and 0x1000 stays;
#                                 0x1000 x 4096 + 4094 = 0x01000ffe
#   class 1 (f 4095, start 1):    0x01000ffe = 4098 x 4095, so 4098 x 4096 + 1 = 0x01002001
#   class 0 (f 1, start 0):       0x01002001 >= 2^20, so the word 0x2001 goes out and 0x100 stays; x 4096 = 0x00100000
BASE = bytes((10, 10, 10, 200))
NEW = bytes((10, 10, 11, 201))
PAYLOAD = bytes.fromhex("00 02 00001000 0120 ff0f")


def by_hand(payload: bytes = PAYLOAD) -> bytes:
    return ctx_decode(payload, BASE, width=1, mantissa=0, row=2, tables=parse_tables(BY_HAND))


def test_the_payload_worked_out_by_hand_is_read_and_written() -> None:
    assert by_hand() == NEW
    tables = parse_tables(BY_HAND)
    assert ctx_encode(BASE, NEW, width=1, mantissa=0, row=2, classes=[0, 1], tables=tables, lanes_log2=0) == PAYLOAD


def one_token(token: int, *, width: int = 1, mantissa: int = 0) -> TableSet:
    """Class 1 and `token` are certain, so that every state stays 2^16 and only extra bits are left."""
    freqs = np.zeros((1, token + 1), np.uint16)
    freqs[0, token] = 4096
    return TableSet(
        width=width,
        mantissa=mantissa,
        classes=1,
        bins=1,
        tokens=token + 1,
        bin_map=bytes(256),
        class_freqs=np.array([[0, 4096], [0, 4096]], np.uint16),
        token_freqs=freqs,
    )


def test_extra_bits_are_read_from_the_lowest() -> None:
    # t = 12, two extra bits each; down by 13 (extra 1, bits 1 0) and by 14 (extra 2, bits 0 1): 1001 = 0x09
    payload = bytes.fromhex("00 00 00000100 09")
    assert ctx_decode(payload, bytes((50, 50)), width=1, mantissa=0, row=2, tables=one_token(24)) == bytes((37, 36))


@pytest.mark.parametrize(
    ("extra", "token", "base", "new"),
    [
        # t = 16 has 6 extra bits from 72 on: 56 is 128, the furthest down; up it is only a number for width 2
        (56, 32, 5, 133),
        (57, 32, 5, None),
        (55, 31, 5, 132),
        (56, 31, 5, None),
    ],
)
def test_a_difference_fits_its_width(extra: int, token: int, base: int, new: int | None) -> None:
    payload = bytes.fromhex("00 00 00000100") + bytes((extra,))
    if new is None:
        with pytest.raises(ValueError, match="does not fit"):
            ctx_decode(payload, bytes((base,)), width=1, mantissa=0, row=1, tables=one_token(token))
    else:
        assert ctx_decode(payload, bytes((base,)), width=1, mantissa=0, row=1, tables=one_token(token)) == bytes((new,))


def test_a_row_is_no_longer_than_a_slab() -> None:
    payload = bytes.fromhex("00 00 00000100")
    assert ctx_decode(payload, b"\5", width=1, mantissa=0, row=4_194_304, tables=one_token(1)) == b"\6"
    with pytest.raises(ValueError, match="rows of 4194305"):
        ctx_decode(payload, b"\5", width=1, mantissa=0, row=4_194_305, tables=one_token(1))


def test_float_neighbours_are_one_step_apart() -> None:
    # bf16 -1.0 (0xbf80) to the next number away from zero, 0xbf81: d = +1, token 1
    payload = bytes.fromhex("00 00 00000100")
    new = ctx_decode(payload, b"\x80\xbf", width=2, mantissa=7, row=1, tables=one_token(1, width=2, mantissa=7))
    assert new == b"\x81\xbf"


@pytest.mark.parametrize(
    ("m", "t", "extra", "count"),
    [(11, 11, 0, 0), (12, 12, 0, 2), (15, 12, 3, 2), (16, 13, 0, 3), (23, 13, 7, 3), (24, 14, 0, 4), (128, 16, 56, 6)],
)
def test_the_encoder_cuts_tokens_as_the_table_says(m: int, t: int, extra: int, count: int) -> None:
    assert token_of(m) == (2 * t - 1, extra, count)
    assert token_of(-m) == (2 * t, extra, count)


@st.composite
def ctx_cases(draw: st.DrawFn) -> dict:
    width, mantissa = draw(st.sampled_from(sorted(PAIRS)))
    count, row = draw(st.integers(1, 70)), draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = -(-count // row)
    tables = random_tables(
        rng, width=width, mantissa=mantissa, classes=draw(st.integers(1, 6)), bins=draw(st.integers(1, 9))
    )
    kind = np.dtype(f"<u{width}")
    base = rng.integers(0, 1 << 8 * width, count, np.uint64).astype(kind)
    reach = np.exp2(rng.uniform(0, 8 * width, count))  # steps of all sizes, wrapping around too
    steps = (rng.uniform(-1, 1, count) * reach).astype(np.int64).astype(kind)
    classes = rng.integers(0, tables.classes + 1, rows)
    steps[np.repeat(classes, row)[:count] == 0] = 0
    return {
        "base": base.tobytes(),
        "new": (base + steps).tobytes(),
        "width": width,
        "mantissa": mantissa,
        "row": row,
        "classes": classes.tolist(),
        "tables": tables,
        "lanes_log2": draw(st.integers(0, 4)),
    }


def decode(payload: bytes, case: dict) -> bytes:
    return ctx_decode(payload, case["base"], **{k: case[k] for k in ("width", "mantissa", "row", "tables")})


@given(ctx_cases())
@settings(max_examples=50, deadline=None)
def test_what_is_encoded_is_decoded(case: dict) -> None:
    assert decode(ctx_encode(**case), case) == case["new"]


@pytest.mark.parametrize(("width", "mantissa"), sorted(PAIRS))
def test_the_ends_of_a_width_are_decoded(width: int, mantissa: int) -> None:
    top = 1 << 8 * width
    ends = [0, 1, top // 2 - 1, top // 2, top // 2 + 1, top - 1]
    base, new = (b"".join(pair[i].to_bytes(width, "little") for pair in pairs(ends)) for i in (0, 1))
    tables = random_tables(np.random.default_rng(1), width=width, mantissa=mantissa, classes=1, bins=5)
    case = {"base": base, "new": new, "width": width, "mantissa": mantissa, "row": 7, "tables": tables}
    assert decode(ctx_encode(**case, classes=[1] * 6, lanes_log2=2), case) == new


def pairs(values: list[int]) -> list[tuple[int, int]]:
    return [(a, b) for a in values for b in values]


def test_several_parts_of_tokens_are_one_sequence() -> None:
    # 9,000 tokens are more than the decoder takes at a time; each has extra bits that do not end on a byte
    count = 9_000
    base = np.arange(count).astype("<u2")
    new = base + np.where(base < 7_000, 21, 0).astype("<u2")
    tables = random_tables(np.random.default_rng(2), width=2, mantissa=7, classes=2, bins=4)
    classes = np.where(np.arange(count // 90) % 3, 2, 1).tolist()
    case = {"base": base.tobytes(), "width": 2, "mantissa": 7, "row": 90, "tables": tables}
    payload = ctx_encode(**case, new=new.tobytes(), classes=classes, lanes_log2=4)
    assert decode(payload, case) == new.tobytes()


CHANGES = [1 << bit for bit in range(8)] + [0x55, 0xFF]


def small_case() -> dict:
    """Four rows of bf16, classes 2 0 1 2; extra bits of several lengths; two lanes."""
    rng = np.random.default_rng(5)
    tables = random_tables(rng, width=2, mantissa=7, classes=2, bins=3, tokens=39)
    base = rng.integers(0, 65536, 20).astype("<u2")
    steps = np.array([1, -2, 0, 12, 700, 0, 0, 0, 0, 0, -40, 3, 0, -1, 0, 5, -5, 90, -350, 0])
    new = base + steps.astype("<u2")
    return {
        "base": base.tobytes(),
        "new": new.tobytes(),
        "width": 2,
        "mantissa": 7,
        "row": 5,
        "classes": [2, 0, 1, 2],
        "tables": tables,
        "lanes_log2": 1,
    }


def test_no_changed_payload_gives_the_true_slab() -> None:
    case = small_case()
    payload = ctx_encode(**case)
    refused = 0
    for at in range(len(payload)):
        for change in CHANGES:
            wrong = payload[:at] + bytes((payload[at] ^ change,)) + payload[at + 1 :]
            try:
                out = decode(wrong, case)
            except ValueError:
                refused += 1
                continue
            assert len(out) == len(case["base"])
            assert out != case["new"]
    extra_bytes = sum(token_extra_bits(case)) // 8 + 1
    assert refused > len(CHANGES) * (len(payload) - extra_bytes - 4)  # but for extra bits, little else is ever a slab


def token_extra_bits(case: dict) -> list[int]:
    old, now = (np.frombuffer(case[k], "<u2").tolist() for k in ("base", "new"))
    return [token_of(difference(a, b, 16, 7))[2] for a, b in zip(old, now, strict=True)]


def test_a_payload_of_another_length_is_refused() -> None:
    case = small_case()
    payload = ctx_encode(**case)
    for wrong in [payload[:end] for end in range(len(payload))] + [payload + b"\0", payload + bytes(4)]:
        with pytest.raises(ValueError):  # noqa: PT011 any reason will do
            decode(wrong, case)


@pytest.mark.parametrize(
    ("what", "payload"),
    [
        ("32 lanes", "05 02 00001000 0120 ff0f" + "00000100" * 31),
        ("a word too few", "00 01 00001000 0120"),
        ("a word too many", "00 03 00001000 0120 ff0f 0000"),
        ("more words than bytes", "00 ffffff7f 00001000 0120 ff0f"),
        ("a number of words in five groups", "00 8280808000 00001000 0120 ff0f"),
        ("a number of words with an empty last group", "00 8200 00001000 0120 ff0f"),
        ("a lane that ends elsewhere", "00 02 00001000 0120 ff1f"),
        ("a filling byte", "00 02 00001000 0120 ff0f 00"),
    ],
)
def test_a_payload_is_refused_with(what: str, payload: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 the reason is what the parameter says, in other words
        by_hand(bytes.fromhex(payload))


def test_no_coder_starts_below_its_range() -> None:
    # a state of 4096 + slot gives 1 with these symbols of frequency 1, and a word 0 makes that 2^16
    payload = bytes.fromhex("00 01 00100000 0000")
    with pytest.raises(ValueError, match="starts below"):
        ctx_decode(payload, b"\n", width=1, mantissa=0, row=1, tables=parse_tables(BY_HAND))


def test_filling_bits_are_zero() -> None:
    payload = bytes.fromhex("00 00 00000100 19")  # 0x09 and a bit behind the four
    with pytest.raises(ValueError, match="too many extra bits"):
        ctx_decode(payload, bytes((50, 50)), width=1, mantissa=0, row=2, tables=one_token(24))


@pytest.mark.parametrize("other", [{"row": 0}, {"width": 2}, {"mantissa": 3}, {"base": b""}, {"base": BASE[:3]}])
def test_what_the_payload_does_not_belong_to_is_refused(other: dict) -> None:
    case = {"base": BASE, "width": 1, "mantissa": 0, "row": 2, "tables": parse_tables(BY_HAND)} | other
    with pytest.raises(ValueError):  # noqa: PT011
        decode(PAYLOAD, case)


@given(ctx_cases(), st.binary(max_size=60), st.integers(0, 4), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_any_bytes_are_a_slab_or_refused(case: dict, rest: bytes, lanes: int, words: int) -> None:
    payload = struct.pack("<BBI", lanes, words, 65536 + len(rest)) + rest
    try:
        out = decode(payload, case)
    except ValueError:
        return
    assert len(out) == len(case["base"])


def test_each_table_of_a_set_is_its_own_context() -> None:
    # two bins: base words below 128 always step up by 1, others (negative) down by 2: away from zero by 2
    tables = replace(
        one_token(3),
        bins=2,
        bin_map=bytes(128) + b"\1" * 128,
        token_freqs=np.array([[0, 4096, 0, 0], [0, 0, 0, 4096]], np.uint16),
    )
    payload = bytes.fromhex("00 00 00000100")
    new = ctx_decode(payload, bytes((7, 250, 127)), width=1, mantissa=0, row=3, tables=tables)
    assert new == bytes((8, 248, 128))


# --- sparse and planes ---


def test_planes_worked_out_by_hand_are_read() -> None:
    # int16 5 -> 4 (step -1, zigzag 1) and 300 -> 500 (step 200, zigzag 400 = 0x0190): planes 01 90 | 00 01
    assert planes_decode(bytes.fromhex("0190 0001"), struct.pack("<HH", 5, 300), width=2, mantissa=0) == struct.pack(
        "<HH", 4, 500
    )
    # bf16 -0.0 (0x8000, monotone 0xffff) -> 0.0 (monotone 0): step +1, zigzag 2
    assert planes_decode(b"\2\0", b"\0\x80", width=2, mantissa=7) == b"\0\0"


def test_sparse_content_worked_out_by_hand_is_read() -> None:
    # elements 0, 1 and 257 of 258 change: gaps 0, 0, 255 = bytes 255 0; zigzags 1 (-1), 2 (+1), 4 (+2)
    content = struct.pack("<II", 3, 4) + bytes((0, 0, 255, 0)) + bytes((1, 2, 4))
    new = sparse_decode(content, bytes([9] * 258), width=1, mantissa=0)
    assert new == bytes([8, 10] + [9] * 255 + [11])
    assert sparse_decode(bytes(8), b"abcd", width=4, mantissa=23) == b"abcd"


@st.composite
def differences(draw: st.DrawFn) -> tuple[int, int, bytes, bytes]:
    width, mantissa = draw(st.sampled_from(KNOWN))
    length = width * draw(st.integers(1, 40))
    base = draw(st.binary(min_size=length, max_size=length))
    return width, mantissa, base, draw(st.one_of(st.just(base), st.binary(min_size=length, max_size=length)))


def zigzags(width: int, mantissa: int, base: bytes, new: bytes) -> list[int]:
    bits = 8 * width
    mask = (1 << bits) - 1

    def monotone(data: bytes) -> list[int]:
        numbers = [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]
        return [w ^ (mask >> 1) if mantissa and w >> (bits - 1) else w for w in numbers]

    steps = [(b - a) & mask for a, b in zip(monotone(base), monotone(new), strict=True)]
    return [2 * s if s < 1 << (bits - 1) else 2 * (mask + 1 - s) - 1 for s in steps]


def planes(numbers: list[int], width: int) -> bytes:
    return bytes(z >> 8 * k & 255 for k in range(width) for z in numbers)


@given(differences())
@settings(max_examples=40, deadline=None)
def test_planes_come_back(case: tuple[int, int, bytes, bytes]) -> None:
    width, mantissa, base, new = case
    content = planes(zigzags(*case), width)
    assert planes_decode(content, base, width=width, mantissa=mantissa) == new
    with pytest.raises(ValueError, match="planes of"):
        planes_decode(content + b"\0", base, width=width, mantissa=mantissa)


@given(differences(), st.integers(0, 2**40 - 1), st.binary(max_size=3), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_sparse_content_comes_back(case: tuple[int, int, bytes, bytes], kept: int, junk: bytes, cut: int) -> None:
    width, mantissa, base, new = case
    new = b"".join((base if kept >> i & 1 else new)[i * width : (i + 1) * width] for i in range(len(base) // width))
    numbers = zigzags(width, mantissa, base, new)
    at = [i for i, z in enumerate(numbers) if z]
    gaps = bytes(b - a - 1 for a, b in zip([-1, *at], at, strict=False))
    content = struct.pack("<II", len(at), len(gaps)) + gaps + planes([numbers[i] for i in at], width)
    if len(content) <= len(base) + 8:
        assert sparse_decode(content, base, width=width, mantissa=mantissa) == new
    wrong = content[: len(content) - cut] + junk
    try:
        assert len(sparse_decode(wrong, base, width=width, mantissa=mantissa)) == len(base)
    except ValueError:
        assert wrong != content or len(content) > len(base) + 8


@pytest.mark.parametrize(
    ("what", "content"),
    [
        ("too short for its counts", "010000"),
        ("a gap that does not end", "01000000 02000000 ffff 02"),
        ("a gap that does not end, behind all", "01000000 02000000 00ff 02"),
        ("more gaps than elements", "01000000 02000000 0000 02"),
        ("fewer gaps than elements", "02000000 01000000 00 0202"),
        ("a position beyond the last", "01000000 01000000 04 02"),
        ("positions that add up beyond the last", "02000000 02000000 0102 0202"),
        ("a missing value", "01000000 01000000 00"),
        ("a value too many", "01000000 01000000 00 0202"),
        ("counts that overflow 32 bits", "ffffffff 01000000 00 02"),
        ("content beyond the slab's length", "03000000 03000000 000000 020202"),
    ],
)
def test_sparse_content_is_refused_with(what: str, content: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 the reason is what the parameter says, in other words
        sparse_decode(bytes.fromhex(content), b"abcd", width=1, mantissa=0)


@pytest.mark.parametrize(("width", "base"), [(3, b"abc"), (2, b"abc"), (1, b"")])
def test_a_base_of_another_width_is_refused(width: int, base: bytes) -> None:
    with pytest.raises(ValueError, match="width"):
        planes_decode(base, base, width=width, mantissa=0)
