"""The project's own mutator, for where atheris is not: input number `index` of `seed` is always the same."""

from __future__ import annotations

import random

EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
MAX_BYTES = 8192


def make(seeds: list[bytes], seed: int, index: int) -> bytes:
    rng = random.Random(seed << 40 | index)
    data = bytearray(rng.choice(seeds))
    for _ in range(1 << rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(data):
                data[at] = rng.randrange(256)
            case 2:
                size = rng.choice((1, 2, 4, 8))
                data[at : at + size] = (rng.choice(EDGES) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
            case 3:
                del data[at : at + rng.randrange(1, 17)]
            case 4:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 5:
                other = rng.choice(seeds)
                start = rng.randrange(len(other) + 1)
                data[at : at + rng.choice((0, 16))] = other[start : start + rng.randrange(1, 65)]
    return bytes(data[:MAX_BYTES])
