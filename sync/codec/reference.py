"""The plain decoders of `ctx`, `sparse` and `planes`: docs/formats/slab.md word for word, in numpy and Python.

They need no compiled code, and are what compiled code is held against. They trust nothing: ValueError says
what does not hold, and what is returned always has the length of the base. Headers, hashes and zstd are the
caller's.

A token costs one turn of a plain loop whatever the number of lanes: numpy over at most 16 lanes is no quicker.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sync.codec.tables import SCALE, TableSet

MAX_ROW = 4_194_304
MAX_LANES_LOG2 = 4
MAX_LANES = 1 << MAX_LANES_LOG2

_STATE_BITS = 16
_LOWEST_STATE = 1 << _STATE_BITS
_SLOT_BITS = 12
_CHUNK = 8_192  # tokens at a time, a multiple of every number of lanes
_SPARSE_HEAD = struct.Struct("<II")  # elements, gap bytes

Words = NDArray[Any]  # unsigned integers of one width


class _Table(NamedTuple):
    symbols: bytes  # [4096] symbol of a slot
    freqs: list[int]
    starts: list[int]


def planes_decode(planes: bytes, base: bytes, *, width: int, mantissa: int) -> bytes:
    """The slab whose zigzags from `base` have these byte planes (not compressed)."""
    old = _words(base, width)
    if len(planes) != len(base):
        raise ValueError(f"planes of {len(planes)} bytes for a base of {len(base)}")
    return _stepped(old, _unzigzag(_from_planes(planes, width)), mantissa).tobytes()


def sparse_decode(content: bytes, base: bytes, *, width: int, mantissa: int) -> bytes:
    """The slab that differs from `base` as `content` (not compressed) says."""
    new = _words(base, width).copy()
    if not _SPARSE_HEAD.size <= len(content) <= len(base) + _SPARSE_HEAD.size:
        raise ValueError(f"sparse content of {len(content)} bytes for a base of {len(base)}")
    count, gap_bytes = _SPARSE_HEAD.unpack_from(content)
    planes_at = _SPARSE_HEAD.size + gap_bytes
    if len(content) != planes_at + count * width:
        raise ValueError(f"sparse content of {len(content)} bytes is not {count} elements and {gap_bytes} gap bytes")
    at = _positions(content[_SPARSE_HEAD.size : planes_at], count, len(new))
    new[at] = _stepped(new[at], _unzigzag(_from_planes(content[planes_at:], width)), mantissa)
    return new.tobytes()


def ctx_decode(payload: bytes, base: bytes, *, width: int, mantissa: int, row: int, tables: TableSet) -> bytes:
    """The slab that `payload` makes of `base`, whose rows have `row` elements."""
    if (tables.width, tables.mantissa) != (width, mantissa):
        raise ValueError(f"tables are for width {tables.width} with mantissa {tables.mantissa}")
    if not 1 <= row <= MAX_ROW:
        raise ValueError(f"rows of {row} elements; accepted: 1 to {MAX_ROW}")
    new = _words(base, width).copy()
    coder, extra = _coders(payload)
    classes = _classes(coder, -(-len(new) // row), tables)
    class_of = np.repeat(classes, row)[: len(new)]
    busy = class_of > 0
    new[busy] = _busy(coder, extra, new[busy], class_of[busy], tables)
    return new.tobytes()


def _coders(payload: bytes) -> tuple[_Coder, _Extra]:
    if not payload or payload[0] > MAX_LANES_LOG2:
        raise ValueError(
            f"ctx payload begins with {payload[:1].hex()}; accepted: 00 to 0{MAX_LANES_LOG2}, log2 of its lanes"
        )
    words, states_at = _varint(payload, 1)
    words_at = states_at + (4 << payload[0])
    extra_at = words_at + 2 * words
    if extra_at > len(payload):
        raise ValueError(f"ctx payload of {len(payload)} bytes, its sections need {extra_at}")
    states = np.frombuffer(payload[states_at:words_at], "<u4").tolist()
    if min(states) < _LOWEST_STATE:
        raise ValueError("a coder starts below 2^16")
    found = np.frombuffer(payload[words_at:extra_at], "<u2").astype(np.uint16)
    return _Coder(states, found), _Extra(payload[extra_at:])


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number and where it ends."""
    value = 0
    for shift, byte in zip(range(0, 28, 7), data[at : at + 4], strict=False):
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80 and (byte or not shift):
            return value, at
    raise ValueError("no number of words")


def _classes(coder: _Coder, rows: int, tables: TableSet) -> NDArray[np.uint8]:
    out = bytearray()
    by_class = _tables(tables.class_freqs)

    def of_the_row_before() -> Iterator[_Table]:
        for _ in range(rows):
            yield by_class[out[-1] if out else 0]

    coder.decode(of_the_row_before(), out, lanes=1)
    return np.frombuffer(bytes(out), np.uint8)


def _busy(coder: _Coder, extra: _Extra, old: Words, class_of: NDArray[np.uint8], tables: TableSet) -> Words:
    """The new words of all elements in rows with tokens; `old` and `class_of` are of just these elements."""
    new = np.empty_like(old)
    by_context = _tables(tables.token_freqs)
    contexts = (class_of.astype(np.uint16) - 1) * tables.bins + _bins(old, tables)
    for start in range(0, len(old), _CHUNK):
        part = slice(start, start + _CHUNK)
        out = bytearray()
        coder.decode(map(by_context.__getitem__, contexts[part].tolist()), out)
        steps = _steps(np.frombuffer(bytes(out), np.uint8), extra, old[part])
        new[part] = _stepped(old[part], steps, tables.mantissa)
    coder.finish()
    extra.finish()
    return new


def _bins(old: Words, tables: TableSet) -> NDArray[np.uint8]:
    bits = 8 * tables.width
    exponent_mask = (1 << (bits - 1 - tables.mantissa)) - 1
    x = (old >> tables.mantissa) & exponent_mask if tables.mantissa else old
    return np.frombuffer(tables.bin_map, np.uint8)[x]


def _steps(tokens: NDArray[np.uint8], extra: _Extra, old: Words) -> Words:
    """Signed steps, as words modulo 2^bits, of elements with these tokens."""
    bits = 8 * old.dtype.itemsize
    size = (tokens.astype(np.int64) + 1) >> 1  # t, from here on m
    is_long = size >= 12
    counts = size[is_long] - 10
    size[is_long] = 8 + (1 << counts) + extra.read(counts)
    is_up = tokens & 1 == 1
    if (size + is_up > 1 << (bits - 1)).any():
        raise ValueError(f"a difference does not fit into {bits} bits")
    away = np.where(is_up, size, -size)  # from zero: d
    is_negative = old >> (bits - 1) == 1
    return np.where(is_negative, -away, away).astype(old.dtype)


def _tables(freqs: NDArray[np.uint16]) -> list[_Table]:
    counts = freqs.astype(np.int64)
    starts = np.cumsum(counts, axis=1) - counts
    symbols = np.repeat(np.tile(np.arange(counts.shape[1], dtype=np.uint8), len(counts)), counts.ravel()).tobytes()
    rows = zip(counts.tolist(), starts.tolist(), strict=True)
    return [_Table(symbols[i * SCALE : (i + 1) * SCALE], *row) for i, row in enumerate(rows)]


class _Coder:
    """rANS: symbols from interleaved states that share one sequence of words."""

    def __init__(self, states: list[int], words: NDArray[np.uint16]) -> None:
        self._states = list(states)
        self._words = iter(words.data)

    def decode(self, tables: Iterable[_Table], out: bytearray, lanes: int = MAX_LANES) -> None:
        """Appends one symbol for each table; begins with lane 0, and uses the first `lanes` lanes at most."""
        states, words, append = self._states, self._words, out.append
        try:
            for (symbols, freqs, starts), lane in zip(tables, cycle(range(min(lanes, len(states)))), strict=False):
                state = states[lane]
                slot = state & (SCALE - 1)
                symbol = symbols[slot]
                state = freqs[symbol] * (state >> _SLOT_BITS) + slot - starts[symbol]
                if state < _LOWEST_STATE:
                    state = state << _STATE_BITS | next(words)
                states[lane] = state
                append(symbol)
        except StopIteration:
            raise ValueError("there are too few words") from None

    def finish(self) -> None:
        if any(state != _LOWEST_STATE for state in self._states):
            raise ValueError("a coder does not end at 2^16")
        if next(self._words, None) is not None:
            raise ValueError("there are too many words")


class _Extra:
    """Numbers of up to 32 bits, the lowest first, from the lowest bit of each byte on."""

    def __init__(self, data: bytes) -> None:
        self._bits = 8 * len(data)
        self._bytes = np.frombuffer(data + bytes(5), np.uint8)
        self._at = 0

    def read(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of `counts` bits each."""
        ends = self._at + np.cumsum(counts)
        if len(ends) == 0:
            return counts
        if ends[-1] > self._bits:
            raise ValueError("there are too few extra bits")
        self._at = int(ends[-1])
        starts = ends - counts
        window = np.zeros_like(starts)
        for i in range(5):
            window |= self._bytes[(starts >> 3) + i].astype(np.int64) << 8 * i
        numbers: NDArray[np.int64] = (window >> (starts & 7)) & ((1 << counts) - 1)
        return numbers

    def finish(self) -> None:
        if self._bits - self._at >= 8 or self._bytes[self._at >> 3] >> (self._at & 7):
            raise ValueError("there are too many extra bits")


def _positions(gap_bytes: bytes, count: int, elements: int) -> NDArray[np.int64]:
    coded = np.frombuffer(gap_bytes, np.uint8)
    ends = np.flatnonzero(coded != 255)
    if len(ends) != count or (len(coded) and coded[-1] == 255):
        raise ValueError(f"{len(coded)} gap bytes are not {count} gaps")
    at = np.cumsum(coded, dtype=np.int64)[ends] + np.arange(count)
    if count and at[-1] >= elements:
        raise ValueError(f"position {at[-1]} of {elements} elements")
    return at


def _words(data: bytes, width: int) -> Words:
    if width not in (1, 2, 4, 8) or not data or len(data) % width:
        raise ValueError(f"{len(data)} bytes of elements of width {width}")
    return np.frombuffer(data, f"<u{width}")


def _from_planes(planes: bytes, width: int) -> Words:
    return np.frombuffer(np.frombuffer(planes, np.uint8).reshape(width, -1).T.tobytes(), f"<u{width}")


def _unzigzag(zigzags: Words) -> Words:
    steps: Words = (zigzags >> 1) ^ np.negative(zigzags & 1)
    return steps


def _stepped(old: Words, steps: Words, mantissa: int) -> Words:
    return _monotone(_monotone(old, mantissa) + steps, mantissa)


def _monotone(words: Words, mantissa: int) -> Words:
    if mantissa == 0:
        return words
    bits = 8 * words.dtype.itemsize
    mapped: Words = words ^ (np.negative(words >> (bits - 1)) & ((1 << (bits - 1)) - 1))
    return mapped
