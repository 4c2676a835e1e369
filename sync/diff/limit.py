"""The yardstick of `outrider sync diff`: how many bits a tensor's difference has at least under a plain model.

Zeroth-order entropy, tensor by tensor, of the integer steps (docs/formats/slab.md, "Words") in the context of the
exponent bin of the base (8 bins: powers of two below the tensor's highest exponent, the last one open) and of the row's
activity (unchanged; up to the median of the changed rows' share of changed words; above it). No table, row class or
header is counted: no coder with this model reaches it, one with a better model can go below. Integers have one bin.
Words of 4 and 8 bytes: the byte planes of the zigzagged steps, added up. Without a base: those of the words themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sync.codec.words import Words, monotone, zigzag

_BINS: Final = 8
_CLASSES: Final = 3
_FEW_KEYS: Final = 1 << 18  # are sorted; more are counted in a table over all symbols

Chunks = Callable[[], Iterator[tuple[bytes, bytes]]]  # (base, new) of one length, whole words, from the start each time


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Of one tensor. `changed`: share of its words that differ, None without a base."""

    changed: float | None
    bits: float


def limit_of_step(chunks: Chunks, *, words: int, width: int, mantissa: int, row: int) -> Limit:
    """`row`: words per row. Reads everything twice, memory is constant but for one counter per row."""
    rows, top = _rows(chunks, words=words, width=width, mantissa=mantissa, row=row)
    changed = int(rows.sum())
    if changed == 0:
        return Limit(changed=0.0, bits=0.0)
    classes = _classes(rows, words, row)
    is_wide = width >= 4
    planes = [_Counts(width=1 if is_wide else width, words=words) for _ in range(width if is_wide else 1)]
    for at, base, new in _placed(chunks, width):
        of_rows, lengths = _rows_of(at, len(base), row)
        wanted = classes[of_rows]
        if not wanted.any():
            continue
        context = np.repeat(wanted, lengths) * _BINS
        if mantissa:
            context += np.minimum(top - _exponents(base, mantissa), _BINS - 1).astype(np.int64)
        steps = _steps(base, new, mantissa)
        symbols = zigzag(steps).view(np.uint8).reshape(-1, width).T if is_wide else (steps,)
        for plane, of_plane in zip(planes, symbols, strict=True):
            plane.add(context, of_plane)
    return Limit(changed=changed / words, bits=sum(plane.bits() for plane in planes))


def limit_of_new(chunks: Iterator[bytes], width: int) -> Limit:
    """A tensor that has no base."""
    counts = np.zeros((width, 256), np.int64)
    for chunk in chunks:
        for number, plane in enumerate(np.frombuffer(chunk, np.uint8).reshape(-1, width).T):
            counts[number] += np.bincount(plane, minlength=256)
    return Limit(changed=None, bits=sum(_entropy(one) - _entropy(one.sum(keepdims=True)) for one in counts))


def _rows(chunks: Chunks, *, words: int, width: int, mantissa: int, row: int) -> tuple[NDArray[np.int64], int]:
    """Changed words of each row, and the highest exponent of the base."""
    rows, top = np.zeros(-(-words // row), np.int64), 0
    for at, base, new in _placed(chunks, width):
        differs = (base != new).view(np.uint8)
        if differs.any():
            of_rows, lengths = _rows_of(at, len(base), row)
            rows[of_rows] += np.add.reduceat(differs, np.cumsum(lengths) - lengths, dtype=np.int64)
        if mantissa:
            top = max(top, int(_exponents(base, mantissa).max()))
    return rows, top


def _classes(rows: NDArray[np.int64], words: int, row: int) -> NDArray[np.int64]:
    lengths = np.full(len(rows), row, np.int64)
    lengths[-1] = words - row * (len(rows) - 1)
    share = rows / lengths
    median = np.median(share[rows > 0])
    return np.where(rows == 0, 0, np.where(share <= median, 1, 2))


def _placed(chunks: Chunks, width: int) -> Iterator[tuple[int, Words, Words]]:
    at = 0
    for base, new in chunks():
        old = np.frombuffer(base, f"<u{width}")
        yield at, old, np.frombuffer(new, f"<u{width}")
        at += len(old)


def _rows_of(at: int, count: int, row: int) -> tuple[slice, NDArray[np.int64]]:
    """The rows that `count` words from word `at` on belong to, and how many words of each."""
    first, last = at // row, (at + count - 1) // row
    edges = np.arange(first, last + 2) * row
    edges[0], edges[-1] = at, at + count
    return slice(first, last + 1), np.diff(edges)


def _exponents(base: Words, mantissa: int) -> Words:
    bits = 8 * base.dtype.itemsize
    found: Words = (base >> mantissa) & base.dtype.type((1 << (bits - 1 - mantissa)) - 1)
    return found


def _steps(base: Words, new: Words, mantissa: int) -> Words:
    steps: Words = monotone(new) - monotone(base) if mantissa else new - base
    return steps


@dataclass(slots=True, kw_only=True)
class _Counts:
    """How often each symbol of `width` bytes came in each context."""

    width: int
    words: int  # that will come at most
    _keys: list[NDArray[np.int64]] = field(default_factory=list)
    _table: NDArray[np.int64] | None = None

    def add(self, context: NDArray[np.int64], symbols: NDArray[Any]) -> None:
        keys = (context << (8 * self.width)) + symbols
        if self.words <= _FEW_KEYS:
            self._keys.append(keys)
            return
        size = _CLASSES * _BINS << (8 * self.width)
        counts = np.bincount(keys, minlength=size)
        self._table = counts if self._table is None else self._table + counts

    def bits(self) -> float:
        if self._table is not None:
            keys = np.flatnonzero(self._table)
            counts = self._table[keys]
        elif self._keys:
            keys, counts = np.unique(np.concatenate(self._keys), return_counts=True)
        else:
            return 0.0
        of_context = np.bincount(keys >> (8 * self.width), weights=counts)
        return _entropy(counts) - _entropy(of_context)


def _entropy(counts: NDArray[Any]) -> float:
    """Minus the sum of n x log2(n)."""
    used = counts[counts > 0].astype(np.float64)
    return -float((used * np.log2(used)).sum())
