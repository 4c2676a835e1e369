"""The kernels against plain integers, the slow encoder and the reference decoder; the hostile is refused, not read."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sync.codec import kernels, reference
from sync.codec.tables import TableSet
from tests.sync.codec import reference_encoder
from tests.sync.codec.tablesets import random_tables

pytestmark = pytest.mark.skipif(not kernels.HAVE_KERNELS, reason="installed without a C compiler")

KINDS = [(1, 0), (1, 2), (1, 3), (2, 0), (2, 7), (2, 10), (4, 0), (4, 23), (8, 0), (8, 52)]
CTX_KINDS = [(1, 0), (1, 2), (1, 3), (2, 7), (2, 10), (4, 23)]
CLASSES, BINS = 3, 5


def pair(rng: np.random.Generator, width: int, n: int, row: int) -> tuple[np.ndarray, np.ndarray]:
    """(raw, base): most elements unchanged, some by a little, a few anything at all, some rows not touched."""
    base = rng.integers(0, 256, n * width, dtype=np.uint8).view(f"<u{width}")
    raw = base + np.where(rng.random(n) < 0.3, rng.integers(-20, 21, n), 0).astype(base.dtype)
    anything = rng.random(n) < 0.03
    raw[anything] = rng.integers(0, 256, n * width, dtype=np.uint8).view(base.dtype)[anything]
    still = np.repeat(rng.random(-(-n // row)) < 0.3, row)[:n]
    raw[still] = base[still]
    return raw, base


def row_classes(rng: np.random.Generator, raw: np.ndarray, base: np.ndarray, row: int) -> np.ndarray:
    changed = np.add.reduceat(raw != base, np.arange(0, len(raw), row)) > 0
    return np.where(changed, rng.integers(1, CLASSES + 1, len(changed)), 0).astype(np.uint8)


def tables_for(rng: np.random.Generator, width: int, mantissa: int) -> TableSet:
    return random_tables(rng, width=width, mantissa=mantissa, classes=CLASSES, bins=BINS)


@pytest.mark.parametrize(("width", "mantissa"), KINDS)
def test_planes_and_sparse_lists_come_back_and_are_as_written_down(width: int, mantissa: int) -> None:
    rng = np.random.default_rng(width + mantissa)
    for n in (1, 7, 300, 2500):
        raw, base = pair(rng, width, n, 50)
        bits = 8 * width
        zigzags = []
        for old, new in zip(base.tolist(), raw.tolist(), strict=True):
            step = reference_encoder.monotone(new, bits, mantissa) - reference_encoder.monotone(old, bits, mantissa)
            step = (step + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
            zigzags.append(2 * step if step >= 0 else -2 * step - 1)
        planes = b"".join(bytes(z >> 8 * plane & 255 for z in zigzags) for plane in range(width))
        assert kernels.planes_diff(raw, base, width, mantissa) == planes
        assert kernels.planes_undo(planes, base, width, mantissa) == raw.tobytes()
        assert reference.planes_decode(planes, base.tobytes(), width=width, mantissa=mantissa) == raw.tobytes()

        gaps, before, changed = b"", -1, [z for z in zigzags if z]
        for at, z in enumerate(zigzags):
            if z:
                gaps += b"\xff" * ((at - before - 1) // 255) + bytes([(at - before - 1) % 255])
                before = at
        content = struct.pack("<II", len(changed), len(gaps)) + gaps
        content += b"".join(bytes(z >> 8 * plane & 255 for z in changed) for plane in range(width))
        gathered = kernels.sparse_gather(raw, base, width, mantissa)
        assert gathered == (content if len(content) < n * width else None)
        if len(content) <= n * width + 8:
            assert kernels.sparse_apply(content, base, width, mantissa) == raw.tobytes()


def test_distant_differences_take_several_gap_bytes() -> None:
    base = bytes(2000)
    raw = bytearray(base)
    for at in (254, 510, 1999):  # gaps of 254, 255 and 1488
        raw[at] = 1
    content = kernels.sparse_gather(bytes(raw), base, 1, 0)
    assert content == struct.pack("<II", 3, 9) + bytes([254, 255, 0, 255, 255, 255, 255, 255, 213]) + bytes([2] * 3)
    assert kernels.sparse_apply(content, base, 1, 0) == raw


@pytest.mark.parametrize(("width", "mantissa"), CTX_KINDS)
def test_tokens_bins_and_what_is_counted_of_them(width: int, mantissa: int) -> None:
    rng = np.random.default_rng(width + mantissa)
    raw, base = pair(rng, width, 3000, 70)
    raw[:4] = base[:4] + np.array([1 << (8 * width - 1), (1 << (8 * width - 1)) - 1, 12, 11], base.dtype)
    bin_map = bytes(rng.integers(0, BINS, 256, dtype=np.uint8))
    tokens, bins = kernels.ctx_tokens(raw, base, width, mantissa, bin_map)
    bits, top = 8 * width, 1 << (8 * width - 1)
    for old, new, token, found in zip(base.tolist(), raw.tolist(), tokens.tolist(), bins.tolist(), strict=True):
        assert token == reference_encoder.token_of(reference_encoder.difference(old, new, bits, mantissa))[0]
        assert found == bin_map[old if mantissa == 0 else (old & ~top) >> mantissa]

    row, starts = 70, range(0, 3000, 70)
    groups = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 3, 6: 4} | {t: 5 if t & 1 else 6 for t in range(7, 23)}
    histogram = np.zeros((len(starts), BINS, 8), np.uint16)
    for at, (token, found) in enumerate(zip(tokens.tolist(), bins.tolist(), strict=True)):
        histogram[at // row, found, groups.get(token, 7)] += 1
    assert (kernels.ctx_row_histograms(tokens, bins, row, BINS) == histogram).all()

    of_rows = rng.integers(0, CLASSES + 1, len(starts)).astype(np.uint8)
    counts = kernels.ctx_counts(tokens, bins, row, of_rows, CLASSES, BINS, 81)
    seen = Counter(
        ((int(of_rows[at // row]) - 1) * BINS + int(bins[at]), int(tokens[at]))
        for at in range(3000)
        if of_rows[at // row]
    )
    assert {(int(c), int(t)): int(counts[c, t]) for c, t in np.argwhere(counts)} == seen

    costs = rng.integers(0, 1 << 24, (11 * BINS, 81)).astype(np.uint32)  # 11: more than one group of lanes
    sums = kernels.ctx_row_costs(tokens, bins, row, costs, 11)
    of_each = costs.reshape(11, BINS, 81)[:, bins, tokens].astype(np.int64)
    assert (sums == np.add.reduceat(of_each, starts, axis=1).T).all()


def test_counts_and_costs_stop_where_their_type_ends() -> None:
    tokens = np.zeros(70_000, np.uint8)
    assert kernels.ctx_row_histograms(tokens, tokens, 1 << 20, 1)[0, 0].tolist() == [65535, 0, 0, 0, 0, 0, 0, 0]
    costs = np.array([[1 << 30], [1]], np.uint32)
    assert kernels.ctx_row_costs(tokens, tokens, 1 << 20, costs, 2).tolist() == [[2**32 - 1, 70_000]]


@pytest.mark.parametrize(("width", "mantissa"), CTX_KINDS)
@pytest.mark.parametrize("lanes_log2", range(5))
def test_the_slow_encoder_writes_the_same_payload_and_both_decoders_read_it(
    width: int, mantissa: int, lanes_log2: int
) -> None:
    rng = np.random.default_rng([width, mantissa, lanes_log2])
    for n, row in ((1, 1), (33, 4), (1000, 1), (1000, 60)):
        raw, base = pair(rng, width, n, row)
        tables = tables_for(rng, width, mantissa)
        classes = row_classes(rng, raw, base, row)
        payload = kernels.ctx_encode(raw, base, width, mantissa, row, classes, tables, lanes_log2)
        assert payload == reference_encoder.ctx_encode(
            base.tobytes(),
            raw.tobytes(),
            width=width,
            mantissa=mantissa,
            row=row,
            classes=classes.tolist(),
            tables=tables,
            lanes_log2=lanes_log2,
        )
        assert kernels.ctx_decode(payload, base, width, mantissa, row, tables) == raw.tobytes()
        plain = reference.ctx_decode(payload, base.tobytes(), width=width, mantissa=mantissa, row=row, tables=tables)
        assert plain == raw.tobytes()


@pytest.mark.parametrize(("width", "mantissa"), CTX_KINDS)
@pytest.mark.parametrize("row", [1, 384, 1 << 22])
def test_slabs_of_several_chunks_come_back(width: int, mantissa: int, row: int) -> None:
    rng = np.random.default_rng([width, mantissa, row])
    for n in (8193, 30_001):
        raw, base = pair(rng, width, n, row)
        raw[-1] = base[-1] + 1
        tables = tables_for(rng, width, mantissa)
        classes = row_classes(rng, raw, base, row)
        for lanes_log2 in (0, 3, 4):
            payload = kernels.ctx_encode(raw, base, width, mantissa, row, classes, tables, lanes_log2)
            assert payload is not None
            unaligned = memoryview(b"?" + payload)[1:]
            assert kernels.ctx_decode(unaligned, base, width, mantissa, row, tables) == raw.tobytes()


def test_a_large_step_takes_extra_bits_of_its_own() -> None:
    """By hand: m = 100 is k = 4, 6 bits of 28; m = 13 is k = 0, 2 bits of 1."""
    base, raw = np.zeros(2, np.uint16), np.array([100, 13], np.uint16)
    freqs = np.zeros((1, 49), np.uint16)
    freqs[0, [23, 31]] = 2048
    tables = TableSet(
        width=2,
        mantissa=7,
        classes=1,
        bins=1,
        tokens=49,
        bin_map=bytes(256),
        class_freqs=np.array([[0, 4096], [0, 4096]], np.uint16),
        token_freqs=freqs,
    )
    payload = kernels.ctx_encode(raw, base, 2, 7, 2, b"\x01", tables, 0)
    # 2^16 is below 2048 << 20: no word. 23: 32 x 4096 + 0; then 31: 131072 // 2048 x 4096 + 2048
    assert payload == struct.pack("<BBI", 0, 0, 64 * 4096 + 2048) + bytes([28 | 1 << 6])


def test_what_the_tables_cannot_code_is_none() -> None:
    rng = np.random.default_rng(1)
    tables = tables_for(rng, 2, 7)
    base = np.full(40, 0x3F80, np.uint16)
    few = replace(tables, tokens=3, token_freqs=np.tile(np.array([4000, 96, 0], np.uint16), (CLASSES * BINS, 1)))
    for step, is_coded in ((1, True), (0xFFFF, False), (50, False)):  # -1 has frequency 0, 50 no entry at all
        coded = kernels.ctx_encode(base + np.uint16(step), base, 2, 7, 20, b"\x01\x01", few, 1)
        assert (coded is not None) == is_coded
    with pytest.raises(ValueError, match="row of class 0 that changed"):
        kernels.ctx_encode(base + np.uint16(1), base, 2, 7, 20, b"\x01\x00", tables, 1)


def outcome(decode: Callable[[], bytes]) -> bytes | None:
    try:
        return decode()
    except ValueError:
        return None


def mutations(rng: np.random.Generator, data: bytes, count: int, head: int) -> list[bytes]:
    """Bits flipped, bytes set, pieces cut out, doubled or cut off; every second one in the first `head` bytes."""
    made = []
    for number in range(count):
        new = bytearray(data)
        at = int(rng.integers(0, head if number % 2 else len(new)))
        kind = int(rng.integers(0, 5))
        if kind == 0:
            new[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1:
            new[at] = int(rng.choice([0, 1, 127, 128, 254, 255]))
        elif kind == 2:
            del new[at : at + int(rng.integers(1, 9))]
        elif kind == 3:
            new[at:at] = new[at : at + int(rng.integers(1, 9))]
        else:
            del new[at:]
        made.append(bytes(new))
    return made


@pytest.mark.parametrize(("width", "mantissa"), CTX_KINDS)
def test_damaged_payloads_are_refused_or_give_what_the_reference_gives(width: int, mantissa: int) -> None:
    rng = np.random.default_rng([3, width, mantissa])
    raw, base = pair(rng, width, 120, 20)
    tables = tables_for(rng, width, mantissa)
    classes = row_classes(rng, raw, base, 20)
    refused = 0
    for lanes_log2 in range(5):
        payload = kernels.ctx_encode(raw, base, width, mantissa, 20, classes, tables, lanes_log2)
        assert payload is not None
        for damaged in mutations(rng, payload, 60, 20):
            mine = outcome(lambda d=damaged: kernels.ctx_decode(d, base, width, mantissa, 20, tables))
            plain = outcome(
                lambda d=damaged: reference.ctx_decode(
                    d, base.tobytes(), width=width, mantissa=mantissa, row=20, tables=tables
                )
            )
            assert mine == plain
            refused += mine is None
        for other in (*(payload[:length] for length in range(len(payload))), payload + b"\0"):
            assert outcome(lambda d=other: kernels.ctx_decode(d, base, width, mantissa, 20, tables)) is None
    assert refused > 200


@pytest.mark.parametrize(("width", "mantissa"), KINDS)
def test_damaged_sparse_lists_are_refused_or_give_what_the_reference_gives(width: int, mantissa: int) -> None:
    rng = np.random.default_rng([4, width, mantissa])
    base = rng.integers(0, 256, 900 * width, dtype=np.uint8).view(f"<u{width}")
    raw = base + (rng.random(900) < 0.05).astype(base.dtype)
    content = kernels.sparse_gather(raw, base, width, mantissa)
    assert content is not None
    for damaged in mutations(rng, content, 300, 40):
        mine = outcome(lambda d=damaged: kernels.sparse_apply(d, base, width, mantissa))
        assert mine == outcome(
            lambda d=damaged: reference.sparse_decode(d, base.tobytes(), width=width, mantissa=mantissa)
        )


def test_thousands_of_damaged_payloads_do_no_harm() -> None:
    rng = np.random.default_rng(5)
    raw, base = pair(rng, 2, 9000, 100)
    tables = tables_for(rng, 2, 7)
    classes = row_classes(rng, raw, base, 100)
    payload = kernels.ctx_encode(raw, base, 2, 7, 100, classes, tables, 3)
    assert payload is not None
    for damaged in mutations(rng, payload, 3000, 60):
        found = outcome(lambda d=damaged: kernels.ctx_decode(d, base, 2, 7, 100, tables))
        assert found is None or len(found) == len(base.tobytes())


def test_words_and_extra_bits_that_nothing_reads_are_refused() -> None:
    rng = np.random.default_rng(7)
    raw, base = pair(rng, 2, 400, 20)
    tables = tables_for(rng, 2, 7)
    payload = kernels.ctx_encode(raw, base, 2, 7, 20, row_classes(rng, raw, base, 20), tables, 0)
    assert payload is not None
    assert payload[:1] == b"\0"
    assert payload[1] >= 128 > payload[2]  # the number of words takes two bytes
    words = payload[1] - 128 + 128 * payload[2]
    extra_at = 3 + 4 + 2 * words
    one_word = bytes([0, (words + 1) % 128 + 128, (words + 1) // 128]) + payload[3:extra_at] + bytes(2)
    for damaged in (one_word + payload[extra_at:], payload + b"\0"):
        with pytest.raises(ValueError, match="left over"):
            kernels.ctx_decode(damaged, base, 2, 7, 20, tables)


def test_a_step_beyond_the_width_is_refused() -> None:
    """Token 31 of width 1 is m = 72 to 135 of which +127 is the last; 32 ends with -128."""
    for token, extra, is_right in ((31, 55, True), (31, 56, False), (32, 56, True), (32, 57, False)):
        tables = TableSet(
            width=1,
            mantissa=0,
            classes=1,
            bins=1,
            tokens=33,
            bin_map=bytes(256),
            class_freqs=np.array([[0, 4096], [0, 4096]], np.uint16),
            token_freqs=(np.arange(33) == token).astype(np.uint16)[None] * 4096,
        )
        payload = struct.pack("<BBI", 0, 0, 1 << 16) + bytes([extra])
        found = outcome(lambda p=payload, t=tables: kernels.ctx_decode(p, b"\0", 1, 0, 1, t))
        assert found == (bytes([127 if token == 31 else 128]) if is_right else None)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t: kernels.planes_diff(bytes(4), bytes(6), 2, 7), "one length"),
        (lambda t: kernels.planes_undo(bytes(3), bytes(3), 2, 7), "multiple of the width"),
        (lambda t: kernels.sparse_apply(bytes(8), bytes(4), 2, 8), "not known"),
        (lambda t: kernels.sparse_gather(bytes(3), bytes(3), 3, 0), "not known"),
        (lambda t: kernels.ctx_decode(bytes(16), bytes(8), 8, 0, 1, t), "no ctx form"),
        (lambda t: kernels.ctx_decode(bytes(16), bytes(8), 2, 7, 0, t), "rows of no elements"),
        (lambda t: kernels.ctx_decode(bytes(16), bytes(8), 1, 0, 1, t), "more tokens than the width has"),
        (lambda t: kernels.ctx_encode(bytes(8), bytes(8), 2, 7, 2, b"\0", t, 0), "one class for each row"),
        (lambda t: kernels.ctx_encode(bytes(8), bytes(8), 2, 7, 2, b"\0\x04", t, 0), "class beyond"),
        (lambda t: kernels.ctx_encode(bytes(8), bytes(8), 2, 7, 2, b"\0\0", t, 5), "16 lanes"),
        (lambda t: kernels.ctx_tokens(bytes(8), bytes(8), 2, 7, bytes(255)), "256 entries"),
        (lambda t: kernels.ctx_row_histograms(bytes(4), b"\0\0\5\0", 2, 5), "bin beyond"),
        (lambda t: kernels.ctx_counts(bytes(4), bytes(4), 2, b"\1\4", 3, 5, 9), "class beyond"),
        (lambda t: kernels.ctx_counts(b"\0\0\0\x09", bytes(4), 2, b"\1\1", 3, 5, 9), "token beyond"),
    ],
)
def test_what_does_not_fit_together_is_refused(call: Callable[[TableSet], object], says: str) -> None:
    tables = tables_for(np.random.default_rng(1), 2, 7)
    with pytest.raises(ValueError, match=says):
        call(tables)


@pytest.mark.parametrize(
    ("token_freqs", "says"), [([4096, 1], "more than"), ([4095, 0], "less than"), ([65535, 1], "more than")]
)
def test_tables_that_do_not_add_up_are_refused(token_freqs: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kernels.native.tables(1, 1, 2, np.array([0, 4096, 0, 4096], np.uint16), np.array(token_freqs, np.uint16))


@pytest.mark.parametrize(("width", "mantissa"), KINDS)
def test_without_the_kernels_the_bytes_are_the_same(width: int, mantissa: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng([6, width, mantissa])
    base = rng.integers(0, 256, 2000 * width, dtype=np.uint8).view(f"<u{width}")
    raw = base + (rng.random(2000) < 0.05).astype(base.dtype)
    raw[700:1600] = base[700:1600]
    planes = kernels.planes_diff(raw, base, width, mantissa)
    content = kernels.sparse_gather(raw, base, width, mantissa)
    monkeypatch.setattr(kernels, "HAVE_KERNELS", False)
    assert kernels.planes_diff(raw, base, width, mantissa) == planes
    assert kernels.planes_undo(planes, base, width, mantissa) == raw.tobytes()
    assert content is not None
    assert kernels.sparse_gather(raw, base, width, mantissa) == content
    assert kernels.sparse_apply(content, base, width, mantissa) == raw.tobytes()
    assert kernels.sparse_gather(~raw, base, width, mantissa) is None
    with pytest.raises(RuntimeError, match="compiled kernels"):
        kernels.ctx_tokens(raw, base, width, mantissa, bytes(256))
