"""Seeds for the fuzz target over the C decoders: `python -m tests.fuzz.kernels_corpus` (kernels.c has the layout).

Every seed is a payload that the encoder made, so that the fuzzer starts behind the first checks.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from sync.codec import kernels
from sync.codec.model import frequencies
from sync.codec.tables import TableSet

FOLDER = Path(__file__).parent / "corpus/kernels"
KINDS = ((1, 0), (1, 2), (1, 3), (2, 7), (2, 10), (4, 23), (2, 0), (4, 0), (8, 0), (8, 52))
CLASSES, BINS, TOKENS = 2, 2, 33


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(4)
    for number, (width, mantissa) in enumerate(KINDS):
        base = rng.integers(0, 256, 90 * width, dtype=np.uint8).view(f"<u{width}")
        step = np.where(rng.random(90) < 0.2, rng.integers(-14, 15, 90), 0).astype(base.dtype)
        step[30:60] = 0
        raw = base + step
        content = kernels.sparse_gather(raw, base, width, mantissa)
        if content is not None:
            write(f"sparse-{number}", struct.pack("<BBH", 1, number, 90) + base.tobytes() + content)
        if number < 6:
            for lanes_log2 in (0, 2, 4):
                head, payload = ctx(raw, base, width, mantissa, lanes_log2)
                write(
                    f"ctx-{number}-{lanes_log2}", struct.pack("<BBH", 0, number, 90) + head + base.tobytes() + payload
                )
            write(f"encode-{number}", struct.pack("<BBH", 2, number, 90) + head + base.tobytes() + raw.tobytes())


def ctx(raw: np.ndarray, base: np.ndarray, width: int, mantissa: int, lanes_log2: int) -> tuple[bytes, bytes]:
    bin_map = bytes(byte // 16 % BINS for byte in range(256))
    row_classes = np.where(np.add.reduceat(raw != base, np.arange(0, 90, 15)) > 0, [1, 2] * 3, 0).astype(np.uint8)
    tables = TableSet(
        width=width,
        mantissa=mantissa,
        classes=CLASSES,
        bins=BINS,
        tokens=TOKENS,
        bin_map=bin_map,
        class_freqs=np.array([frequencies(np.ones(CLASSES + 1, np.int64))] * (CLASSES + 1)),
        token_freqs=np.array([frequencies(2000 // np.arange(1, TOKENS + 1) ** 2, smooth=True)] * CLASSES * BINS),
    )
    payload = kernels.ctx_encode(raw, base, width, mantissa, 15, row_classes, tables, lanes_log2)
    assert payload is not None
    sizes = struct.pack("<BBBBI", CLASSES - 1, BINS - 1, TOKENS - 1, lanes_log2, 15)
    return sizes + bin_map + tables.class_freqs.tobytes() + tables.token_freqs.tobytes(), payload


def write(name: str, data: bytes) -> None:
    (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
