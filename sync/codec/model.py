"""The context model of a pack: which table set makes its `ctx` slabs shortest (docs/codec-models.md has the search).

A table per (row class, bin of the base's exponent). Rows are put into classes by code length (Lloyd's algorithm over
the rows' histograms), a few sizes of model are tried, and the one that is shortest with its own tables counted is kept.
What it is trained on is bounded: beyond `SAMPLE_ELEMENTS` every second slab, every fourth, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sync.codec import kernels
from sync.codec.ctx import COST_UNIT, PROB_BITS, token_costs
from sync.codec.tables import TableSet

SAMPLE_ELEMENTS: Final = 1 << 25
_LLOYD_ROWS: Final = 1 << 16
_ROUNDS: Final = 5
_GROUPS: Final = 8  # token groups of the row histograms
_BINS: Final = 16
# Classes, bins and how the rows are put into classes at first: by how busy they are alone, or also by whether their
# weights mostly grow or mostly shrink, as those of an int8 row do when its scale has changed.
_TRIED: Final = ((12, 16, "lean"), (12, 16, "busy"), (3, 16, "busy"), (3, 8, "lean"), (1, 16, "busy"), (1, 4, "busy"))
_PRIOR: Final = 0.02  # elements that each class is taken to have of each token group
_BLOCK_ROWS: Final = 256
_TOTAL: Final = 1 << PROB_BITS
_EXPONENT_TAIL: Final = 1e-4  # share of elements above the highest bin's exponent that do not get bins of their own

Counts = NDArray[np.int64]


@dataclass(slots=True)
class Sample:
    """Tokens and contexts of slabs of one (width, mantissa), with their rows."""

    width: int
    mantissa: int
    stride: int = 1
    seen: int = 0
    elements: int = 0
    parts: list[tuple[NDArray[np.uint8], NDArray[np.uint8], int]] = field(default_factory=list)

    def add(self, raw: bytes, base: bytes, row: int) -> None:
        self.seen += 1
        if (self.seen - 1) % self.stride:
            return
        tokens, exponents = kernels.ctx_tokens(raw, base, self.width, self.mantissa, _IDENTITY)
        self.parts.append((tokens, exponents, row))
        self.elements += len(tokens)
        if self.elements > SAMPLE_ELEMENTS and len(self.parts) > 1:
            self.parts = self.parts[::2]
            self.stride *= 2
            self.elements = sum(len(part[0]) for part in self.parts)

    @property
    def is_whole(self) -> bool:
        return self.stride == 1


_IDENTITY: Final = bytes(range(256))


def fit(sample: Sample) -> TableSet | None:
    """The shortest table set for the sample; None where nothing changed."""
    if not any(part[0].any() for part in sample.parts):
        return None
    rows = _Rows(sample)
    made = (rows.tables(*tried) for tried in _TRIED)
    return min(made, key=lambda found: found[1])[0]


def _bin_map(sample: Sample) -> bytes:
    """Floats: one bin per exponent below the highest in use, all lower ones in the last. Integers: by magnitude."""
    if sample.mantissa == 0:
        edges = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 112, 124]  # two bins an octave, of a signed byte
        magnitudes = [min(byte, 256 - byte) for byte in range(256)]
        return bytes(int(np.searchsorted(edges, magnitude, side="right")) - 1 for magnitude in magnitudes)
    used = np.zeros(256, np.int64)
    for _, exponents, _ in sample.parts:
        used += np.bincount(exponents, minlength=256)
    above = np.cumsum(used[::-1])[::-1]  # elements with at least this exponent
    top = int(np.flatnonzero(above > _EXPONENT_TAIL * used.sum())[-1])
    return bytes(min(max(top - exponent, 0), _BINS - 1) for exponent in range(256))


class _Rows:
    """The sample's rows with their histograms over (bin, token group)."""

    def __init__(self, sample: Sample) -> None:
        self._sample, self._bin_map = sample, _bin_map(sample)
        lut = np.frombuffer(self._bin_map, np.uint8)
        self._parts = [(tokens, lut[exponents], row) for tokens, exponents, row in sample.parts]
        self._rows = [kernels.ctx_row_histograms(*part, _BINS).reshape(-1, _BINS * _GROUPS) for part in self._parts]
        self._changed = [_changed(rows) for rows in self._rows]
        rows = np.concatenate(self._rows)
        step = 1 + len(rows) // _LLOYD_ROWS
        self._few = rows[::step].astype(np.float32)
        self._few_changed = np.concatenate(self._changed)[::step]

    def tables(self, classes: int, bins: int, start: str) -> tuple[TableSet, float]:
        """A table set of that size, and the bits of the sample with it, tables included."""
        costs = self._lloyd(classes, start)
        counts = np.zeros((classes * _BINS, 256), np.int64)
        transitions = np.zeros((classes + 1, classes + 1), np.int64)
        for (tokens, fine, row), rows, changed in zip(self._parts, self._rows, self._changed, strict=True):
            of_rows = costs.nearest(rows, changed).astype(np.uint8)
            counts += kernels.ctx_counts(tokens, fine, row, of_rows, classes, _BINS, 256)
            np.add.at(transitions, (np.append(0, of_rows[:-1]), of_rows), 1)
        used = int(np.flatnonzero(counts.any(axis=0))[-1]) + 1
        joined = counts.reshape(classes, bins, _BINS // bins, 256).sum(axis=2).reshape(-1, 256)[:, :used]
        smooth = not self._sample.is_whole
        tables = TableSet(
            width=self._sample.width,
            mantissa=self._sample.mantissa,
            classes=classes,
            bins=bins,
            tokens=used,
            bin_map=bytes(one * bins // _BINS for one in self._bin_map),
            class_freqs=np.array([frequencies(row, smooth=True) for row in transitions]),
            token_freqs=np.array([frequencies(row, smooth=smooth) for row in joined]),
        )
        bits = _bits(joined, tables.token_freqs) + _bits(transitions, tables.class_freqs)
        return tables, bits + 8 * len(tables.to_bytes())

    def _lloyd(self, classes: int, start: str) -> _Costs:
        of_rows = self._start(classes, start)
        for _ in range(_ROUNDS):
            sums = np.zeros((classes, _BINS * _GROUPS), np.float32)
            for block, at in _blocks(self._few):
                member = of_rows[at : at + len(block)] == np.arange(1, classes + 1)[:, None]
                sums += member.astype(np.float32) @ block
            smooth = sums.reshape(classes, _BINS, _GROUPS) + _PRIOR
            tokens = -np.log2(smooth / smooth.sum(axis=2, keepdims=True)).reshape(classes, -1)
            share = np.bincount(of_rows, minlength=classes + 1) + 0.5
            costs = _Costs(tokens.astype(np.float32), -np.log2(share / share.sum()).astype(np.float32))
            of_rows = costs.nearest(self._few, self._few_changed)
        return costs

    def _start(self, classes: int, start: str) -> NDArray[np.int64]:
        """Equal shares of the changed rows, in order of how much more they change than their bases' exponents say."""
        rows = self._few.reshape(-1, _BINS, _GROUPS)
        per_bin = rows.sum(axis=0)
        change = 1 - per_bin[:, 0] / np.maximum(per_bin.sum(axis=1), 1)
        busy = rows[:, :, 1:].sum(axis=(1, 2)) / np.maximum(rows.sum(axis=2) @ change, 1e-9)
        of_rows = np.zeros(len(rows), np.int64)
        sides = self._sides() if start == "lean" else [self._few_changed]
        each = classes // len(sides)
        for side, members in enumerate(sides):
            at = np.flatnonzero(members)
            of_rows[at[np.argsort(busy[at], kind="stable")]] = (
                1 + side * each + np.arange(len(at)) * each // max(1, len(at))
            )
        return of_rows

    def _sides(self) -> list[NDArray[np.bool_]]:
        """Changed rows whose weights mostly shrink, change either way, mostly grow."""
        rows = self._few.reshape(-1, _BINS, _GROUPS)
        up, down = rows[:, :, 1::2].sum(axis=(1, 2)), rows[:, :, 2::2].sum(axis=(1, 2))
        is_lean = np.abs(up - down) > 2 * np.sqrt(up + down)  # beyond two standard deviations
        return [is_lean & (up < down), self._few_changed & ~is_lean, is_lean & (up > down)]


class _Costs:
    """Bits of one element [classes, bins x groups], and of a row's class [classes + 1]."""

    def __init__(self, tokens: NDArray[np.float32], classes: NDArray[np.float32]) -> None:
        self._tokens, self._classes = tokens, classes

    def nearest(self, rows: NDArray[Any], changed: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The class of each row with which it costs least: 0, at no cost but its own, only where nothing changed."""
        found = np.empty(len(rows), np.int64)
        for block, at in _blocks(rows):
            costs = np.empty((len(block), len(self._classes)), np.float32)
            costs[:, 0] = np.where(changed[at : at + len(block)], np.inf, 0)
            costs[:, 1:] = block.astype(np.float32) @ self._tokens.T
            found[at : at + len(block)] = (costs + self._classes).argmin(axis=1)
        return found


def _changed(rows: NDArray[np.uint16]) -> NDArray[np.bool_]:
    return np.asarray(rows.reshape(-1, _BINS, _GROUPS)[:, :, 1:].any(axis=(1, 2)))


def _blocks(rows: NDArray[Any]) -> Iterator[tuple[NDArray[Any], int]]:
    """So few rows at a time that a product of them starts no threads: those would fight with what else runs."""
    for at in range(0, len(rows), _BLOCK_ROWS):
        yield rows[at : at + _BLOCK_ROWS], at


def frequencies(counts: Counts, *, smooth: bool = False) -> NDArray[np.uint16]:
    """Counts as 12-bit frequencies that sum to 4,096: at least 1 where there is a count, or everywhere (`smooth`)."""
    total = int(counts.sum())
    if total == 0:
        counts, total = np.ones_like(counts) if smooth else np.eye(1, len(counts), dtype=np.int64)[0], 1
        total = int(counts.sum())
    freqs: Counts = np.rint(counts * (_TOTAL / total)).astype(np.int64)
    freqs = np.maximum(freqs, ((counts > 0) | smooth).astype(np.int64))
    freqs[int(freqs.argmax())] -= int(freqs.sum()) - _TOTAL
    return np.asarray(freqs, np.uint16)


def _bits(counts: Counts, freqs: NDArray[np.uint16]) -> float:
    costs = token_costs(freqs).astype(np.float64) / COST_UNIT
    return float((counts * np.where(counts > 0, costs, 0)).sum())
