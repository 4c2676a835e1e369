"""Which form a difference travels in: the smallest, and beside it the cheapest to decode where that is another one.

The smallest for slow links; the other for a node whose link is so fast that decoding is what takes the time. The node
picks (`seconds`), since it alone knows its link and what it can decode.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sync.codec import ctx, forms, kernels, model
from sync.codec.header import CTX, CTX_KINDS, FULL, HEADER_BYTES, PLANES, SAME, SPARSE, Encoded, Header
from sync.codec.tables import TableSet

FAST_LINK: Final = 125e6  # bytes/s: the fastest link that a second form is kept for
_WORTH_A_SECOND: Final = 1536  # bytes of payload below which a second form is not worth its place in the index
# Raw bytes per second that one core decodes (benchmarks/codec.py); without the compiled kernels in the second table.
DECODE_RATES: Final = {FULL: 700e6, SAME: 3e9, SPARSE: 1500e6, PLANES: 1000e6, CTX: 450e6}
_PLAIN_RATES: Final = {FULL: 500e6, SAME: 3e9, SPARSE: 400e6, PLANES: 200e6, CTX: 2e6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A slab and the one at its place before: both of one length, a multiple of `width`. `row`: elements."""

    raw: bytes
    base: bytes
    base_id: str
    width: int
    mantissa: int
    row: int


def train(pairs: Iterable[Pair]) -> tuple[TableSet, ...]:
    """One table set per kind of element that `ctx` codes; the pairs are taken one by one, none is kept."""
    if not kernels.HAVE_KERNELS:
        return ()
    samples: dict[tuple[int, int], model.Sample] = {}
    for pair in pairs:
        kind = (pair.width, pair.mantissa)
        if kind in CTX_KINDS and pair.raw != pair.base:
            samples.setdefault(kind, model.Sample(*kind)).add(pair.raw, pair.base, pair.row)
    found = (model.fit(samples[kind]) for kind in sorted(samples))
    return tuple(tables for tables in found if tables is not None)


def choose(pair: Pair, tables: tuple[TableSet, ...], *, full_bytes: int) -> list[Encoded]:
    """Smallest first, then one that is cheaper to decode and pays on a fast link; empty where `full_bytes` is less.

    `full_bytes`: of the object that stands alone, header included.
    """
    candidates = [one for one in differences(pair, tables) if HEADER_BYTES + len(one.payload) < full_bytes]
    if not candidates:
        return []
    smallest = min(candidates, key=lambda one: (len(one.payload), -DECODE_RATES[one.header.form]))
    quickest = min(candidates, key=lambda one: seconds(one.header, FAST_LINK))
    if quickest is smallest or len(smallest.payload) < _WORTH_A_SECOND:
        return [smallest]
    return [smallest, quickest]


def differences(pair: Pair, tables: tuple[TableSet, ...]) -> list[Encoded]:
    """The slab in every form that it has as a difference."""
    if pair.raw == pair.base:
        return [forms.encode_same(pair.raw, pair.width, pair.mantissa)]
    kind, found = (pair.width, pair.mantissa), []
    for number, one in enumerate(tables):
        if (one.width, one.mantissa) == kind:
            found.append(ctx.encode(pair.raw, pair.base, *kind, pair.row, one, number=number, base_id=pair.base_id))
    found.append(forms.encode_sparse(pair.raw, pair.base, *kind, base_id=pair.base_id))
    found.append(forms.encode_planes(pair.raw, pair.base, *kind, base_id=pair.base_id))
    return [one for one in found if one is not None]


def seconds(header: Header, link: float) -> float:
    """Until the slab is there over a link of `link` bytes/s, fetched and decoded; infinite for an unknown form."""
    rates = DECODE_RATES if kernels.HAVE_KERNELS else _PLAIN_RATES
    if header.form not in rates:
        return float("inf")
    return header.payload_length / link + header.raw_length / rates[header.form]
