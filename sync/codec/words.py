"""Elements as integers: the order-preserving mapping of floats, differences folded to small numbers, byte planes.

Plain numpy, width 1, 2, 4 or 8 bytes, little-endian; what runs once per byte of a push is in the kernels as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]  # unsigned, little-endian


def words(raw: bytes | memoryview, width: int, mantissa: int) -> Words:
    """One unsigned integer per element; floats (mantissa > 0) in their own order."""
    found: Words = np.frombuffer(raw, dtype=f"<u{width}")
    return monotone(found) if mantissa else found


def monotone(found: Words) -> Words:
    """Bit patterns of floats <-> integers in the floats' order (its own inverse): flip the lower bits of negatives."""
    bits = 8 * found.itemsize
    sign = found.view(f"<i{found.itemsize}") >> (bits - 1)
    flipped: Words = found ^ (sign.view(found.dtype) & found.dtype.type((1 << (bits - 1)) - 1))
    return flipped


def zigzag(step: Words) -> Words:
    """Small differences of either sign become small unsigned numbers."""
    sign = step.view(f"<i{step.itemsize}") >> (8 * step.itemsize - 1)
    return (step << 1) ^ sign.view(step.dtype)


def unzigzag(folded: Words) -> Words:
    step: Words = (folded >> 1) ^ (0 - (folded & 1)).astype(folded.dtype)
    return step


def to_planes(raw: bytes, width: int) -> bytes:
    """All first bytes of the elements, then all second bytes, and so on."""
    return raw if width == 1 else np.frombuffer(raw, np.uint8).reshape(-1, width).T.tobytes()


def from_planes(planes: bytes, width: int) -> bytes:
    return planes if width == 1 else np.frombuffer(planes, np.uint8).reshape(width, -1).T.tobytes()
