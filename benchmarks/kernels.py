"""How fast one core makes and undoes differences, and what they come to: `python -m benchmarks.kernels`.

Weights are normal, steps are rounded moves of one size over all weights (as an optimizer makes them), so that small
weights change often and large ones hardly ever; a third of the rows stands still. Parts of a release, without zstd,
hashing and files: `sync diff` on real checkpoints measures those.
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Scale, Table, main
from sync.codec import ctx, kernels, model

ROW = 512
_SLAB = 1 << 20
_LANES_LOG2 = 3
_MOVES = {"busy": 3e-5, "quiet": 1e-6}  # of weights with deviation .05


def run(scale: Scale) -> list[Table]:
    if not kernels.HAVE_KERNELS:
        return []
    table = Table(
        title="Kernels on one core",
        how="Best of several runs in processor time; MB/s of raw bytes, size in % of raw (before zstd but for ctx).",
        columns=("elements", "moves", "changed %", "form", "size %", "encode MB/s", "decode MB/s"),
    )
    slabs, rounds = scale.pick(32, 1), scale.pick(7, 1)
    for moves, size in _MOVES.items():
        for width, mantissa, pairs in ((2, 7, _bf16(slabs, size)), (1, 0, _int8(slabs, size))):
            changed = 100 * float(np.mean([np.mean(raw != base) for raw, base in pairs]))
            for form, made, encode, decode in _forms(pairs, width, mantissa, rounds):
                table.add("bf16" if mantissa else "int8", moves, changed, form, made, encode, decode)
    return [table]


Words = NDArray[Any]
Pairs = list[tuple[Words, Words]]


def _floats(slabs: int, width: int, size: float) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    rng, made = np.random.default_rng(4), []
    for _ in range(slabs):
        base = rng.normal(0, 0.05, (_SLAB // width // ROW, ROW)).astype(np.float32)
        still = rng.random((len(base), 1)) < 1 / 3
        made.append((np.where(still, base, base + rng.normal(0, size, base.shape)).astype(np.float32), base))
    return made


def _bf16(slabs: int, size: float) -> Pairs:
    def rounded(values: NDArray[np.float32]) -> Words:
        found: Words = ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).ravel()
        return found

    return [(rounded(raw), rounded(base)) for raw, base in _floats(slabs, 2, size)]


def _int8(slabs: int, size: float) -> Pairs:
    def rounded(values: NDArray[np.float32]) -> Words:
        found: Words = np.clip(np.rint(values / 0.0016), -127, 127).astype(np.int8).view(np.uint8).ravel()
        return found

    return [(rounded(raw), rounded(base)) for raw, base in _floats(slabs, 1, size)]


def _forms(pairs: Pairs, width: int, mantissa: int, rounds: int) -> list[tuple[str, float, float, float]]:
    """(form, size in %, encode and decode in MB/s)"""
    raw_bytes = sum(raw.nbytes for raw, _ in pairs)
    sample = model.Sample(width, mantissa)
    for raw, base in pairs:
        sample.add(raw.tobytes(), base.tobytes(), ROW)
    tables = model.fit(sample)
    found: list[tuple[str, float, float, float]] = []

    def measure(
        form: str, encode: Callable[[Words, Words], bytes | None], decode: Callable[[bytes, Words], bytes]
    ) -> None:
        made, to = _best(lambda: [encode(raw, base) for raw, base in pairs], rounds)
        payloads = [one for one in made if one is not None]
        if len(payloads) < len(pairs):
            return
        back, fro = _best(lambda: [decode(one, base) for one, (_, base) in zip(payloads, pairs, strict=True)], rounds)
        assert back == [raw.tobytes() for raw, _ in pairs]
        size = 100 * sum(map(len, payloads)) / raw_bytes
        found.append((form, size, raw_bytes / to / 1e6, raw_bytes / fro / 1e6))

    if tables is not None:

        def ctx_encode(raw: Words, base: Words) -> bytes | None:
            tokens, bins = kernels.ctx_tokens(raw, base, width, mantissa, tables.bin_map)
            classes, _ = ctx.assign_classes(tokens, bins, ROW, tables)
            return kernels.ctx_encode(raw, base, width, mantissa, ROW, classes, tables, _LANES_LOG2)

        measure("ctx", ctx_encode, lambda one, base: kernels.ctx_decode(one, base, width, mantissa, ROW, tables))
    measure(
        "sparse",
        lambda raw, base: kernels.sparse_gather(raw, base, width, mantissa),
        lambda one, base: kernels.sparse_apply(one, base, width, mantissa),
    )
    measure(
        "planes",
        lambda raw, base: kernels.planes_diff(raw, base, width, mantissa),
        lambda one, base: kernels.planes_undo(one, base, width, mantissa),
    )
    return found


def _best(work: Callable[[], list[Any]], rounds: int) -> tuple[list[Any], float]:
    best = float("inf")
    for _ in range(rounds):
        started = thread_time()
        made = work()
        best = min(best, thread_time() - started)
    return made, best


if __name__ == "__main__":
    main(run, __doc__)
