"""Table sets of the form `ctx`: the frequencies that a pack's slabs of one (width, mantissa) are coded with.

Owns `TableSet`, its bytes and everything that must hold of it (docs/formats/slab.md, "Table set"). Who
estimates frequencies from data, and who turns them into look-up tables, is elsewhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import CorruptSlab

FORMAT = 1
SCALE = 4096  # what the frequencies of one table sum to
PAIRS = frozenset({(1, 0), (1, 2), (1, 3), (2, 7), (2, 10), (4, 23)})  # (width, mantissa) that `ctx` knows
MAX_CLASSES = 64
MAX_BINS = 64
MAX_CONTEXTS = 512
MAX_BYTES = 65_536

_HEAD = struct.Struct("<6BH")  # format, width, mantissa, C, B, T, runs of the bin map
_MAX_TOKENS = {1: 33, 2: 49, 4: 81}
_MAX_ZEROS = 12  # of one gamma code


def max_tokens(width: int) -> int:
    """How many tokens there can be at most for elements of `width` bytes (1, 2 or 4)."""
    return _MAX_TOKENS[width]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableSet:
    """Frequencies (each row sums to 4,096) of row classes and tokens; ValueError where the format has no such set."""

    width: int
    mantissa: int
    classes: int  # C, besides class 0
    bins: int  # B
    tokens: int  # T
    bin_map: bytes  # [256] bin of an integer base word, or of a base's exponent field
    class_freqs: NDArray[np.uint16]  # [C + 1, C + 1]: class of the row before, class
    token_freqs: NDArray[np.uint16]  # [C x B, T]: context, token

    def __post_init__(self) -> None:
        problem = _size_problem(self.width, self.mantissa, self.classes, self.bins, self.tokens)
        if problem is None and (len(self.bin_map) != 256 or max(self.bin_map) >= self.bins):
            problem = f"the bin map needs 256 entries below {self.bins}"
        wanted = {
            "class": (self.class_freqs, (self.classes + 1, self.classes + 1)),
            "token": (self.token_freqs, (self.classes * self.bins, self.tokens)),
        }
        for name, (freqs, shape) in wanted.items():
            if problem is None and (freqs.shape != shape or freqs.dtype != np.uint16):
                problem = f"{name} frequencies are {freqs.dtype} {freqs.shape}, not uint16 {shape}"
            if problem is None and not (freqs.sum(axis=1, dtype=np.int64) == SCALE).all():
                problem = f"the frequencies of a {name} table do not sum to {SCALE}"
        if problem is not None:
            raise ValueError(problem)

    def to_bytes(self) -> bytes:
        """The set as it stands in a pack."""
        runs = _runs(self.bin_map)
        head = _HEAD.pack(FORMAT, self.width, self.mantissa, self.classes, self.bins, self.tokens, len(runs) // 2)
        bits, at = 0, 0
        out = bytearray(head + runs)
        for freqs in (*self.class_freqs.tolist(), *self.token_freqs.tolist()):
            for number in _table_numbers(freqs):
                zeros = (number + 1).bit_length() - 1
                rest = number + 1 - (1 << zeros)
                bits |= ((rest << 1) | 1) << (at + zeros)
                at += 2 * zeros + 1
            out += (bits & ((1 << (at & ~7)) - 1)).to_bytes(at >> 3, "little")
            bits, at = bits >> (at & ~7), at & 7
        return bytes(out) + bits.to_bytes((at + 7) >> 3, "little")


def parse_tables(data: bytes) -> TableSet:
    """The set in `data`, all of it; CorruptSlab where anything does not hold."""
    try:
        return _parse(data)
    except ValueError as exc:
        raise CorruptSlab("table set", str(exc)) from exc


def _parse(data: bytes) -> TableSet:
    if not _HEAD.size <= len(data) <= MAX_BYTES:
        raise ValueError(f"{len(data)} bytes, a table set has {_HEAD.size} to {MAX_BYTES}")
    number, width, mantissa, classes, bins, tokens, runs = _HEAD.unpack_from(data)
    if number != FORMAT:
        raise ValueError(f"format {number}, known is {FORMAT}")
    if problem := _size_problem(width, mantissa, classes, bins, tokens):
        raise ValueError(problem)
    bits_at = _HEAD.size + 2 * runs
    if bits_at > len(data):
        raise ValueError(f"{runs} runs of the bin map do not fit into {len(data)} bytes")
    gammas = _Gammas(data[bits_at:])
    made = TableSet(
        width=width,
        mantissa=mantissa,
        classes=classes,
        bins=bins,
        tokens=tokens,
        bin_map=_bin_map(data[_HEAD.size : bits_at]),
        class_freqs=_tables(gammas, classes + 1, classes + 1),
        token_freqs=_tables(gammas, classes * bins, tokens),
    )
    gammas.finish()
    return made


def _size_problem(width: int, mantissa: int, classes: int, bins: int, tokens: int) -> str | None:
    if (width, mantissa) not in PAIRS:
        return f"width {width} with mantissa {mantissa}; accepted: {sorted(PAIRS)}"
    if not (1 <= classes <= MAX_CLASSES and 1 <= bins <= MAX_BINS and classes * bins <= MAX_CONTEXTS):
        return f"{classes} classes and {bins} bins; accepted: 1 to {MAX_CLASSES} each, product up to {MAX_CONTEXTS}"
    if not 1 <= tokens <= max_tokens(width):
        return f"{tokens} tokens; accepted for width {width}: 1 to {max_tokens(width)}"
    return None


def _runs(bin_map: bytes) -> bytes:
    values = np.frombuffer(bin_map, np.uint8)
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    lengths = np.diff(np.append(starts, 256))
    return np.stack((values[starts], lengths - 1), axis=1).astype(np.uint8).tobytes()


def _bin_map(runs: bytes) -> bytes:
    lengths = [length + 1 for length in runs[1::2]]
    if sum(lengths) != 256:
        raise ValueError(f"the runs of the bin map cover {sum(lengths)} entries, not 256")
    return b"".join(bytes((value,)) * length for value, length in zip(runs[::2], lengths, strict=True))


def _table_numbers(freqs: list[int]) -> Iterator[int]:
    """What is written for one table: the last symbol used, the one left out, the frequencies of the others."""
    last = max(symbol for symbol, freq in enumerate(freqs) if freq)
    yield last
    if last:
        most = freqs.index(max(freqs))
        yield most
        yield from (freq for symbol, freq in enumerate(freqs[: last + 1]) if symbol != most)


def _tables(gammas: _Gammas, count: int, symbols: int) -> NDArray[np.uint16]:
    freqs = np.zeros((count, symbols), np.uint16)
    for table in freqs:
        last = gammas.read()
        if last >= symbols:
            raise ValueError(f"a table of {symbols} symbols ends with symbol {last}")
        if last == 0:
            table[0] = SCALE
            continue
        most = gammas.read()
        if most > last:
            raise ValueError(f"a table that ends with symbol {last} leaves out symbol {most}")
        row = [gammas.read() for _ in range(last)]
        rest = SCALE - sum(row)
        row.insert(most, rest)
        if rest < 1 or row[last] == 0:
            raise ValueError("a table's frequencies leave nothing for a symbol that must have some")
        table[: last + 1] = row
    return freqs


class _Gammas:
    """Reads numbers, each coded as the gamma of itself plus 1, from the lowest bit of each byte on."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").tobytes()
        self._at = 0

    def read(self) -> int:
        one = self._bits.find(1, self._at, self._at + _MAX_ZEROS + 1)
        zeros = one - self._at
        end = one + 1 + zeros
        if one < 0 or end > len(self._bits):
            raise ValueError(f"no number at bit {self._at} of {len(self._bits)}")
        self._at = end
        if zeros == 0:
            return 0
        window = int.from_bytes(self._data[(one + 1) >> 3 : (end + 7) >> 3], "little") >> ((one + 1) & 7)
        return (1 << zeros) + (window & ((1 << zeros) - 1)) - 1

    def finish(self) -> None:
        if len(self._bits) - self._at >= 8 or self._bits.find(1, self._at) >= 0:
            raise ValueError(f"something follows the last table, at bit {self._at} of {len(self._bits)}")
