"""How much a node would fetch to get from one variant's file to the next, estimated: for choosing and for the report.

The estimate is the order-0 entropy of the integer difference, per byte plane and tensor. What is stored in the end is
smaller where a codec knows more (`sync` does), and larger by tables and an index.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.tensors import Array
from hardware.build.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    changed_share: float  # of the 8 bit integers, zero points apart
    size_bytes: int  # an estimate, of all constants


def estimate(before: Graph, after: Graph) -> Delta:
    """Constants that the graph before lacks, or has in another shape or type, count in full."""
    known = before.initializers()
    bits, integers, changed = 0.0, 0, 0
    for name, array in after.initializers().items():
        base = known.get(name)
        is_comparable = base is not None and base.shape == array.shape and base.dtype == array.dtype
        planes = _difference(base, array) if is_comparable and base is not None else None
        bits += 8 * array.nbytes if planes is None else sum(_entropy_bits(plane) for plane in planes.T)
        if array.dtype.itemsize == 1 and not name.endswith("_zero_point"):
            integers += array.size
            changed += array.size if planes is None else int(np.count_nonzero(planes))
    return Delta(changed_share=changed / max(1, integers), size_bytes=int(np.ceil(bits / 8)))


def _difference(base: Array, array: Array) -> Array:
    """The difference as unsigned integers of the same width, in bytes: uint8 [elements, width]."""
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    difference: Array = array.reshape(-1).view(unsigned) - base.reshape(-1).view(unsigned)
    return difference.view(np.uint8).reshape(-1, array.dtype.itemsize)


def _entropy_bits(values: Array) -> float:
    counts = np.bincount(values, minlength=256)
    counts = counts[counts > 0]
    return float((counts * (np.log2(len(values)) - np.log2(counts))).sum()) if len(values) else 0.0
