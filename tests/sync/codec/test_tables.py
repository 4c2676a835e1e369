"""Table sets: the bytes of one made by hand, round trips, and what a reader refuses."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import CorruptSlab
from sync.codec.tables import PAIRS, TableSet, max_tokens, parse_tables
from tests.sync.codec.tablesets import random_tables

# Width 1, mantissa 0, C = 1, B = 1, T = 3, one run of the bin map: bin 0, 256 times.
#   class table after class 0, f = (1, 4095): last 1 -> gamma 2 = 010, most 1 -> 010, f[0] = 1 -> 010
#   class table after class 1, f = (4096, 0): last 0 -> gamma 1 = 1
#   token table, f = (4094, 1, 1): last 2 -> gamma 3 = 011, most 0 -> 1, f[1] = 1 -> 010, f[2] = 1 -> 010
# Bits in order: 01001001 01011101 0010(0000); the lowest bit first: 0x92 0xba 0x04.
HEAD = "01 01 00 01 01 03 0100"
RUNS = "00ff"
BITS = "92ba04"
BY_HAND = bytes.fromhex(HEAD + RUNS + BITS)


def by_hand() -> TableSet:
    return TableSet(
        width=1,
        mantissa=0,
        classes=1,
        bins=1,
        tokens=3,
        bin_map=bytes(256),
        class_freqs=np.array([[1, 4095], [4096, 0]], np.uint16),
        token_freqs=np.array([[4094, 1, 1]], np.uint16),
    )


def same(a: TableSet, b: TableSet) -> bool:
    return (
        (a.width, a.mantissa, a.classes, a.bins, a.tokens, a.bin_map)
        == (b.width, b.mantissa, b.classes, b.bins, b.tokens, b.bin_map)
        and np.array_equal(a.class_freqs, b.class_freqs)
        and np.array_equal(a.token_freqs, b.token_freqs)
    )


def test_the_set_worked_out_by_hand_is_written_and_read() -> None:
    assert by_hand().to_bytes() == BY_HAND
    assert same(parse_tables(BY_HAND), by_hand())


def test_bits_of_a_number_follow_the_lowest_first() -> None:
    # f[1] = 9 -> gamma 10 = 000 1 010 (10 = 8 + 2); last 1 -> 010, most 0 -> 1; the class tables as above.
    # Bits in order: 01001001 01 | 010 1 0001010: 01001001 01010100 01010(000)
    made = parse_tables(bytes.fromhex("01 01 00 01 01 02 0100 00ff 922a0a"))
    assert made.token_freqs.tolist() == [[4087, 9]]


def test_a_number_may_have_twelve_zeros() -> None:
    # class table after 0: last 1 -> 010, most 0 -> 1, f[1] = 4095 -> 12 zeros, 1, 12 zeros; the two others: 1, 1
    made = parse_tables(bytes.fromhex("01 01 00 01 01 01 0100 00ff 0a000160"))
    assert made.class_freqs.tolist() == [[1, 4095], [4096, 0]]


@pytest.mark.parametrize(("width", "largest", "tokens"), [(1, 128, 33), (2, 32768, 49), (4, 2**31, 81)])
def test_the_largest_difference_has_the_last_token(width: int, largest: int, tokens: int) -> None:
    k = int(np.floor(np.log2((largest - 12) / 4 + 1)))
    assert max_tokens(width) == tokens == 2 * (12 + k) + 1


@given(
    pair=st.sampled_from(sorted(PAIRS)),
    size=st.integers(1, 64).flatmap(lambda c: st.tuples(st.just(c), st.integers(1, min(64, 512 // c)))),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
@settings(max_examples=10, deadline=None)
def test_a_set_comes_back_from_its_bytes(pair: tuple[int, int], size: tuple[int, int], seed: int, data) -> None:
    width, mantissa = pair
    tokens = data.draw(st.integers(1, max_tokens(width)))
    rng = np.random.default_rng(seed)
    made = random_tables(rng, width=width, mantissa=mantissa, classes=size[0], bins=size[1], tokens=tokens)
    made.token_freqs[0] = 0  # one table with a single symbol, somewhere
    made.token_freqs[0, rng.integers(tokens)] = 4096
    assert same(parse_tables(made.to_bytes()), made)


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("no bytes", ""),
        ("half a head", "01 01 00 01"),
        ("another format", "02 01 00 01 01 03 0100" + RUNS + BITS),
        ("a width that ctx does not know", "01 08 00 01 01 03 0100" + RUNS + BITS),
        ("a mantissa of another width", "01 01 07 01 01 03 0100" + RUNS + BITS),
        ("no classes", "01 01 00 00 01 03 0100" + RUNS + BITS),
        ("65 classes", "01 01 00 41 01 03 0100" + RUNS + BITS),
        ("no bins", "01 01 00 01 00 03 0100" + RUNS + BITS),
        ("65 bins", "01 01 00 01 41 03 0100" + RUNS + BITS),
        ("more than 512 contexts", "01 01 00 40 09 03 0100" + RUNS + "ff" * 80 + "01"),
        ("no tokens", "01 01 00 01 01 00 0100" + RUNS + BITS),
        ("34 tokens of width 1", "01 01 00 01 01 22 0100" + RUNS + BITS),
        ("no runs", "01 01 00 01 01 03 0000" + BITS),
        ("more runs than bytes", "01 01 00 01 01 03 ffff" + RUNS + BITS),
        ("a map of 255 entries", HEAD + "00fe" + BITS),
        ("a map of 257 entries", "01 01 00 01 01 03 0200 00ff 0000" + BITS),
        ("a bin that does not exist", HEAD + "01ff" + BITS),
        ("no bits", HEAD + RUNS),
        ("a missing byte", HEAD + RUNS + BITS[:-2]),
        # 1, 1, then last 1 -> 010, most 0 -> 1, f[1] = 1 or 2 -> 01 and a bit that is not there
        ("a number cut short", HEAD + RUNS + "ab"),
        ("a byte too many", HEAD + RUNS + BITS + "00"),
        ("filling that is not zero", HEAD + RUNS + "92ba84"),
        # as above, last = 3 (gamma 4: 00 1 00) for the token table: bits 01001001 01 00100 1 ...
        ("a last symbol beyond the table", HEAD + RUNS + "92122a0100"),
        # the others: first table as said, the second one 1, the third one 1
        # last 1 -> 010, most 2 -> 011, the other 1 -> 010
        ("a symbol left out beyond the last", HEAD + RUNS + "b206"),
        # last 1 -> 010, most 0 -> 1, f[1] = 0 -> 1
        ("a last symbol without frequency", HEAD + RUNS + "7a"),
        # 13 zero bits, a one
        ("a number of 13 zeros", HEAD + RUNS + "0020000000"),
        # last 1 -> 010, most 0 -> 1, f[1] = 4096 -> 12 zeros, 1, 1, 11 zeros
        ("frequencies that leave nothing", HEAD + RUNS + "0a000360"),
    ],
)
def test_a_set_is_refused_with(what: str, data: str) -> None:
    with pytest.raises(CorruptSlab, match="table set"):
        parse_tables(bytes.fromhex(data))


def test_a_changed_byte_is_refused_or_another_set() -> None:
    for at in range(len(BY_HAND)):
        for change in range(1, 256):
            wrong = BY_HAND[:at] + bytes((BY_HAND[at] ^ change,)) + BY_HAND[at + 1 :]
            with suppress(CorruptSlab):
                assert not same(parse_tables(wrong), by_hand())


@given(st.binary(max_size=400), st.integers(1, 3), st.integers(1, 3), st.integers(1, 33))
@settings(max_examples=50, deadline=None)
def test_any_bits_are_a_sound_set_or_refused(bits: bytes, classes: int, bins: int, tokens: int) -> None:
    try:
        made = parse_tables(bytes((1, 1, 0, classes, bins, tokens, 1, 0, 0, 255)) + bits)
    except CorruptSlab:
        return
    assert (made.token_freqs.sum(axis=1, dtype=np.int64) == 4096).all()
