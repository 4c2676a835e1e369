"""Table sets for tests: every symbol can be coded, the frequencies are whatever the generator gives."""

from __future__ import annotations

import numpy as np

from sync.codec.tables import TableSet, max_tokens


def random_tables(
    rng: np.random.Generator, *, width: int, mantissa: int, classes: int, bins: int, tokens: int | None = None
) -> TableSet:
    tokens = tokens or max_tokens(width)

    def freqs(count: int, symbols: int) -> np.ndarray:
        shares = rng.dirichlet(np.full(symbols, 0.3), count)
        return (rng.multinomial(4096 - symbols, shares) + 1).astype(np.uint16)

    return TableSet(
        width=width,
        mantissa=mantissa,
        classes=classes,
        bins=bins,
        tokens=tokens,
        bin_map=bytes(np.sort(rng.integers(0, bins, 256)).astype(np.uint8)),
        class_freqs=freqs(classes + 1, classes + 1),
        token_freqs=freqs(classes * bins, tokens),
    )
