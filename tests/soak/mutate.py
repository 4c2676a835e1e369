"""The inputs of the fuzz run: valid calls, and what becomes of them.

Pure: input number `index` of `seed` is always the same. Mutations know the structure (JSON trees, headers, binary
tails, messages), and now and then flip bytes that are none of their business.
"""

from __future__ import annotations

import random

from tests.soak.mutate_grpc import GrpcInput, RawGrpcInput, grpc_input, raw_input
from tests.soak.mutate_http import HttpInput, http_input

Input = HttpInput | GrpcInput | RawGrpcInput


def make(seed: int, index: int) -> Input:
    rng = random.Random(f"{seed}/{index}")
    kind = rng.random()
    if kind < 0.02:
        return raw_input(rng)
    if kind < 0.40:
        return grpc_input(rng)
    if kind < 0.42:
        return HttpInput(rng.randbytes(rng.randint(1, 400)), is_framed=False)
    return http_input(rng)
