"""The `ctx` form of one slab: steps, entropy-coded in the context of the base's own bits and of how busy the row is.

What the tables are made from is in `model`; the arithmetic is in the kernels, or in `reference` where there are none.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sync.codec import kernels
from sync.codec.forms import encoded
from sync.codec.header import CTX, Encoded, Header
from sync.codec.tables import TableSet

PROB_BITS: Final = 12
_MAX_LANES_LOG2: Final = 4
_BITS_PER_LANE: Final = 16 * 256  # a lane costs 16 bits more than it carries: at most 1/256 of what it codes
COST_UNIT: Final = 4096  # to the bit: what a token costs is counted in fractions of it
_NEVER: Final = 1 << 30  # cost of a token that the tables do not have: more than that of any row


def encode(
    raw: bytes, base: bytes, width: int, mantissa: int, row: int, tables: TableSet, *, number: int, base_id: str
) -> Encoded | None:
    """None where the table set has no code for a token of this slab. `number`: the table set's, in the pack."""
    if not kernels.HAVE_KERNELS:
        return None
    tokens, bins = kernels.ctx_tokens(raw, base, width, mantissa, tables.bin_map)
    if tokens.max(initial=0) >= tables.tokens:
        return None
    classes, bits = assign_classes(tokens, bins, row, tables)
    lanes_log2 = min(_MAX_LANES_LOG2, max(0, int(bits // _BITS_PER_LANE).bit_length() - 1))
    payload = kernels.ctx_encode(raw, base, width, mantissa, row, classes.tobytes(), tables, lanes_log2)
    if payload is None:
        return None
    return encoded(CTX, raw, base_id, width, mantissa, payload, tables=number, row=row)


def decode(header: Header, payload: memoryview, base: bytes, tables: TableSet) -> bytes:
    """Raises `ValueError` for whatever does not hold."""
    if (tables.width, tables.mantissa) != (header.width, header.mantissa):
        raise ValueError(f"table set {header.tables} is for other elements")
    return kernels.ctx_decode(payload, base, header.width, header.mantissa, header.row, tables)


def assign_classes(
    tokens: NDArray[np.uint8], bins: NDArray[np.uint8], row: int, tables: TableSet
) -> tuple[NDArray[np.uint8], float]:
    """The cheapest class of each row (0 only where nothing changed), and the bits of all tokens then.

    A class costs what it costs behind the row before and before the next one: settled for the even rows, then for the
    odd ones, twice.
    """
    changed = np.maximum.reduceat(tokens, np.arange(0, len(tokens), row)) > 0
    costs = np.zeros((len(changed), tables.classes + 1))
    costs[changed, 0] = np.inf
    costs[:, 1:] = kernels.ctx_row_costs(tokens, bins, row, token_costs(tables.token_freqs), tables.classes)
    moves = token_costs(tables.class_freqs).astype(np.float64)
    classes = costs.argmin(axis=1)
    for first in (0, 1, 0, 1):
        before = np.concatenate([[0], classes[:-1]])[first::2]
        after = np.concatenate([classes[1:], [0]])[first::2]
        classes[first::2] = (costs[first::2] + moves[before] + moves[:, after].T).argmin(axis=1)
    return classes.astype(np.uint8), float(costs[np.arange(len(classes)), classes].sum()) / COST_UNIT


def token_costs(freqs: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """[C * B, T]: what each token costs in each context, in 1/4096 bit."""
    with np.errstate(divide="ignore"):
        bits = PROB_BITS - np.log2(freqs.astype(np.float64))
    return np.where(freqs > 0, np.rint(bits * COST_UNIT), _NEVER).astype(np.uint32)
