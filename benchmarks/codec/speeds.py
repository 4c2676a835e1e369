"""How fast one core encodes and decodes: each form alone, then a whole file decoded, proven and written.

Kinds and forms alternate, and the figures are medians over the rounds. MB/s are of raw output.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.codec.ours import differ, slab_pairs
from benchmarks.codec.pairs import Files
from benchmarks.report import Table
from sync import codec
from sync.codec import CTX, FULL, PLANES, SPARSE, Encoded, TableSet, ctx, forms
from sync.codec.choice import Pair, differences, train

_SAMPLE_BYTES = 16 << 20  # raw, of each kind


def by_form(chosen: list[Files], rounds: int) -> Table:
    table = Table(
        title="Decoding, by form",
        how=f"One core, MB/s of raw output, medians of {rounds} rounds in which the rows alternate. Verified: with the "
        "payload's hash before and the slab's id after. Each form over the same slabs, whichever form they would take.",
        columns=("pair", "form", "payload %", "decode MB/s", "decode + verify MB/s"),
    )
    work = [(files.name, *one) for files in chosen for one in _encodings(files)]
    times: list[list[tuple[float, float]]] = [[] for _ in work]
    for _ in range(rounds):
        for number, (_, _, slabs, tables) in enumerate(work):
            times[number].append((_seconds(slabs, tables, _bare), _seconds(slabs, tables, _verified)))
    for (name, form, slabs, _), seconds in zip(work, times, strict=True):
        raw = sum(len(pair.raw) for pair, _ in slabs)
        payload = sum(len(one.payload) for _, one in slabs)
        bare, verified = (statistics.median(one) for one in zip(*seconds, strict=True))
        table.add(name, codec.FORM_NAMES[form], 100 * payload / raw, raw / bare / 1e6, raw / verified / 1e6)
    return table


def whole_files(chosen: list[Files], rounds: int) -> Table:
    table = Table(
        title="Whole files",
        how=f"Medians of {rounds} rounds in which the rows alternate. Rebuilt, on one core: read base, decode, verify, "
        "write, hash the whole file, fsync. Encode, on one core: table sets and all forms of every changed slab, "
        "`full` too. Diff, on all cores: what `outrider sync diff` takes, with the index and the limit.",
        columns=("pair", "raw MB", "rebuilt MB/s", "rebuilt MB per CPU s", "encode s", "diff s"),
    )
    taken: list[list[tuple[float, ...]]] = [[] for _ in chosen]
    for _ in range(rounds):
        for number, files in enumerate(chosen):
            with tempfile.TemporaryDirectory() as folder:
                ours = differ(files, Path(folder) / "pair")
            taken[number].append((ours.rebuild_s, ours.rebuild_cpu_s, encode_s(slab_pairs(files)), ours.encode_s))
    for files, seconds in zip(chosen, taken, strict=True):
        raw = files.new.stat().st_size / 1e6
        rebuilt, cpu, encoded, diffed = (statistics.median(one) for one in zip(*seconds, strict=True))
        table.add(files.name, raw, raw / rebuilt, raw / cpu, encoded, diffed)
    return table


def encode_s(pairs: list[Pair]) -> float:
    started = time.perf_counter()
    tables = train(iter(pairs))
    for pair in pairs:
        differences(pair, tables)
        codec.encode_full(pair.raw, pair.width, pair.mantissa)
    return time.perf_counter() - started


Slabs = list[tuple[Pair, Encoded]]
Decode = Callable[[Encoded, bytes, tuple[TableSet, ...]], bytes]


def _encodings(files: Files) -> list[tuple[int, Slabs, tuple[TableSet, ...]]]:
    """By form: slabs of the file's main kind of element that have it, an even sample of all."""
    pairs = slab_pairs(files)
    width = max(pairs, key=lambda pair: len(pair.raw)).width
    pairs = [pair for pair in pairs if pair.width == width]
    tables = train(iter(pairs))
    found: dict[int, Slabs] = {}
    for pair in pairs[:: -(-sum(len(pair.raw) for pair in pairs) // _SAMPLE_BYTES)]:
        for one in (*differences(pair, tables), codec.encode_full(pair.raw, pair.width, pair.mantissa)):
            found.setdefault(one.header.form, []).append((pair, one))
    return [(form, found[form], tables) for form in sorted(found)]


def _seconds(slabs: Slabs, tables: tuple[TableSet, ...], decode: Decode) -> float:
    started = time.perf_counter()
    for pair, one in slabs:
        decode(one, pair.base, tables)
    return time.perf_counter() - started


def _verified(one: Encoded, base: bytes, tables: tuple[TableSet, ...]) -> bytes:
    own = tables[one.header.tables] if one.header.form == CTX else None
    return codec.decode(one.header, one.payload, base=base, tables=own)


def _bare(one: Encoded, base: bytes, tables: tuple[TableSet, ...]) -> bytes:
    payload, form = memoryview(one.payload), one.header.form
    if form == FULL:
        return forms.decode_full(one.header, payload)
    if form == SPARSE:
        return forms.decode_sparse(one.header, payload, base)
    if form == PLANES:
        return forms.decode_planes(one.header, payload, base)
    return ctx.decode(one.header, payload, base, tables[one.header.tables])
