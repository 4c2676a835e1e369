"""A slow encoder of `ctx`, from docs/formats/slab.md alone, in plain integers: it shares no code with a decoder."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from sync.codec.tables import TableSet


def ctx_encode(
    base: bytes,
    new: bytes,
    *,
    width: int,
    mantissa: int,
    row: int,
    classes: Sequence[int],
    tables: TableSet,
    lanes_log2: int,
) -> bytes:
    """The payload; `classes` has one class for each row, and rows of class 0 must equal the base."""
    bits = 8 * width
    bin_map = tables.bin_map
    symbols: list[tuple[list[int], int]] = []  # (frequencies, symbol), in the order of decoding
    extra_bits: list[int] = []
    token_freqs = tables.token_freqs.tolist()
    for j, (old, now) in enumerate(zip(words(base, width), words(new, width), strict=True)):
        row_class = classes[j // row]
        if row_class == 0:
            assert old == now, "a row of class 0 differs from the base"
            continue
        token, extra, count = token_of(difference(old, now, bits, mantissa))
        x = old if mantissa == 0 else (old & ~(1 << (bits - 1))) >> mantissa
        symbols.append((token_freqs[(row_class - 1) * tables.bins + bin_map[x]], token))
        extra_bits += [extra >> i & 1 for i in range(count)]
    class_freqs = tables.class_freqs.tolist()
    in_classes = [(class_freqs[before], one) for before, one in zip([0, *classes], classes, strict=False)]
    lanes = 1 << lanes_log2
    in_lanes = [*((0, *one) for one in in_classes), *((j % lanes, *one) for j, one in enumerate(symbols))]
    states, found = rans(in_lanes, lanes)
    extra_bits += [0] * (-len(extra_bits) % 8)
    packed = bytes(sum(extra_bits[i + k] << k for k in range(8)) for i in range(0, len(extra_bits), 8))
    head = bytes([lanes_log2]) + varint(len(found))
    return head + struct.pack(f"<{lanes}I{len(found)}H", *states, *found) + packed


def varint(value: int) -> bytes:
    groups = [value & 0x7F]
    while value := value >> 7:
        groups[-1] |= 0x80
        groups.append(value & 0x7F)
    return bytes(groups)


def words(data: bytes, width: int) -> list[int]:
    return [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]


def monotone(word: int, bits: int, mantissa: int) -> int:
    return word ^ ((1 << (bits - 1)) - 1) if mantissa and word >> (bits - 1) else word


def difference(old: int, now: int, bits: int, mantissa: int) -> int:
    """d: the step away from zero (for a negative base), signed."""
    step = monotone(now, bits, mantissa) - monotone(old, bits, mantissa)
    d = (-step if old >> (bits - 1) else step) % (1 << bits)
    return d - (1 << bits) if d >> (bits - 1) else d


def token_of(d: int) -> tuple[int, int, int]:
    """(token, extra number, how many bits it has)."""
    m = abs(d)
    t, extra, count = m, 0, 0
    if m >= 12:
        k = 0
        while m - 12 >= 4 * (2 ** (k + 1) - 1):
            k += 1
        t, extra, count = 12 + k, m - 12 - 4 * (2**k - 1), k + 2
    return (2 * t - 1 if d > 0 else 2 * t), extra, count


def rans(symbols: list[tuple[int, list[int], int]], lanes: int) -> tuple[list[int], list[int]]:
    """(states, words) from which a decoder reads these (lane, frequencies, symbol); written from last to first."""
    states, out = [1 << 16] * lanes, []
    for lane, freqs, symbol in reversed(symbols):
        freq, start, state = freqs[symbol], sum(freqs[:symbol]), states[lane]
        assert freq > 0, "a symbol is used that has no frequency"
        if state >= freq << 20:
            out.append(state & 0xFFFF)
            state >>= 16
        states[lane] = state // freq * 4096 + state % freq + start
    return states, out[::-1]
