"""What runs once per byte of a push: the compiled kernels where the build made them, plain numpy where it did not.

Without them (`HAVE_KERNELS` is false) every form is still decoded, slowly, and all forms but `ctx` are made: what only
its encoder needs (`ctx_encode` and the counts) then raises `RuntimeError`. Lengths are checked here and in the kernels;
whatever does not fit together, and corrupt content, is a `ValueError`. Buffers are C-contiguous; answers are new.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sync.codec import reference
from sync.codec.tables import TableSet
from sync.codec.words import Words, to_planes, words, zigzag

if TYPE_CHECKING:
    from sync.codec._kernels import native
else:
    try:
        from sync.codec._kernels import native
    except ImportError:  # no compiler when it was installed
        native = None

HAVE_KERNELS: bool = isinstance(native, ModuleType)

Data = bytes | memoryview | NDArray[Any]
Bytes = NDArray[np.uint8]

GROUPS = 8  # of tokens: 0; +1; -1; +2, 3; -2, 3; +4 to 11; -4 to 11; all others
_READY_TABLES = 4  # at most 2.4 MB each


def planes_diff(raw: Data, base: Data, width: int, mantissa: int) -> bytes:
    """Byte planes of the zigzags of all elements."""
    if HAVE_KERNELS:
        return native.planes_diff(raw, base, width, mantissa)
    return to_planes(zigzag(_steps(raw, base, width, mantissa)).tobytes(), width)


def planes_undo(planes: Data, base: Data, width: int, mantissa: int) -> bytes:
    """What `planes_diff` was given."""
    if HAVE_KERNELS:
        return native.planes_undo(planes, base, width, mantissa)
    return reference.planes_decode(bytes(planes), bytes(base), width=width, mantissa=mantissa)


def sparse_gather(raw: Data, base: Data, width: int, mantissa: int) -> bytes | None:
    """Content of the sparse form; None where it is not shorter than `raw`."""
    if HAVE_KERNELS:
        return native.sparse_gather(raw, base, width, mantissa)
    step = _steps(raw, base, width, mantissa)
    (at,) = step.nonzero()
    gaps = np.diff(at, prepend=-1) - 1
    gap_bytes = np.full(int((gaps // 255 + 1).sum()), 255, np.uint8)
    gap_bytes[np.cumsum(gaps // 255 + 1) - 1] = gaps % 255
    head = np.array([len(at), len(gap_bytes)], "<u4").tobytes()
    content = head + gap_bytes.tobytes() + to_planes(zigzag(step[at]).tobytes(), width)
    return content if len(content) < step.nbytes else None


def sparse_apply(content: Data, base: Data, width: int, mantissa: int) -> bytes:
    """The slab that `sparse_gather` was given."""
    if HAVE_KERNELS:
        return native.sparse_apply(content, base, width, mantissa)
    return reference.sparse_decode(bytes(content), bytes(base), width=width, mantissa=mantissa)


def ctx_decode(payload: Data, base: Data, width: int, mantissa: int, row: int, tables: TableSet) -> bytes:
    """The slab of a ctx payload, whose `tables` are for this width and mantissa."""
    if HAVE_KERNELS:
        return native.ctx_decode(payload, base, width, mantissa, row, tables.bin_map, _ready(tables))
    return reference.ctx_decode(bytes(payload), bytes(base), width=width, mantissa=mantissa, row=row, tables=tables)


def ctx_encode(
    raw: Data, base: Data, width: int, mantissa: int, row: int, classes: Data, tables: TableSet, lanes_log2: int
) -> bytes | None:
    """A ctx payload; None where the tables have no code for it. `classes`: one a row, 0 only where nothing changed."""
    _need_kernels()
    return native.ctx_encode(raw, base, width, mantissa, row, classes, tables.bin_map, _ready(tables), lanes_log2)


def ctx_tokens(raw: Data, base: Data, width: int, mantissa: int, bin_map: bytes) -> tuple[Bytes, Bytes]:
    """Token and bin of every element."""
    _need_kernels()
    tokens, bins = native.ctx_tokens(raw, base, width, mantissa, bin_map)
    return np.frombuffer(tokens, np.uint8), np.frombuffer(bins, np.uint8)


def ctx_row_histograms(tokens: Data, bins: Data, row: int, bin_count: int) -> NDArray[np.uint16]:
    """[rows, bins, GROUPS] counts, which stop at 65,535."""
    _need_kernels()
    counts = np.frombuffer(native.ctx_row_histograms(tokens, bins, row, bin_count), np.uint16)
    return counts.reshape(-1, bin_count, GROUPS)


def ctx_counts(
    tokens: Data, bins: Data, row: int, row_classes: Data, classes: int, bin_count: int, token_count: int
) -> NDArray[np.uint32]:
    """[classes x bins, tokens] counts over all rows but those of class 0."""
    _need_kernels()
    counts = native.ctx_counts(tokens, bins, row, row_classes, classes, bin_count, token_count)
    return np.frombuffer(counts, np.uint32).reshape(-1, token_count)


def ctx_row_costs(tokens: Data, bins: Data, row: int, costs: NDArray[np.uint32], classes: int) -> NDArray[np.uint32]:
    """[rows, classes]: each row's cost, were it of each class; at most 2^32 - 1. `costs`: [classes x bins, tokens]."""
    _need_kernels()
    contexts, token_count = costs.shape
    sums = native.ctx_row_costs(tokens, bins, row, costs, classes, contexts // classes, token_count)
    return np.frombuffer(sums, np.uint32).reshape(-1, classes)


def _steps(raw: Data, base: Data, width: int, mantissa: int) -> Words:
    return words(bytes(raw), width, mantissa) - words(bytes(base), width, mantissa)


def _need_kernels() -> None:
    if not HAVE_KERNELS:
        raise RuntimeError("the compiled kernels are not installed, and encoding in the form ctx needs them")


@lru_cache(maxsize=_READY_TABLES)
def _ready(tables: TableSet) -> native.Tables:
    return native.tables(tables.classes, tables.bins, tables.tokens, tables.class_freqs, tables.token_freqs)
