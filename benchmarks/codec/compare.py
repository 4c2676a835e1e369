"""Bytes and speeds of the parameter codec, beside other ways to the same file.

`--checkpoints DIR` holds the real versions of a fine-tune (see `pairs`); beside them, and without them, there are
generated pairs of many kinds. Peers that are packages are installed into a folder of their own first (`peers.txt`).
`--quick` leaves out the slow ones; `--billion` adds a pair of a thousand million parameters to the memory figures.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.codec import memory, speeds
from benchmarks.codec.files import quantized, read, write
from benchmarks.codec.ours import Ours, differ
from benchmarks.codec.pairs import STEPS, Files, pairs
from benchmarks.codec.peers import BUILT_IN, PEERS, SLOW, measured
from benchmarks.report import Cell, Scale, Table

_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`packages`: where peers that are packages are installed; without it those that need none are compared.
    `names`: pairs to look at, all by default."""

    checkpoints: Path | None = None
    packages: Path | None = None
    names: tuple[str, ...] = ()
    size: float = 1.0
    with_billion: bool = False
    with_speeds: bool = True


def run(scale: Scale, options: Options) -> list[Table]:
    with tempfile.TemporaryDirectory() as folder:
        tables = sizes(Path(folder), options, peers_of(options, quick=scale.quick))
        if options.with_speeds:
            chosen = _measured_files(Path(folder), options)
            rounds = scale.pick(_ROUNDS, 1)
            tables += [speeds.by_form(chosen, rounds), speeds.whole_files(chosen, rounds)]
            if options.with_billion:
                chosen = [*chosen, memory.billion(Path(folder))]
            tables.append(memory.table(chosen, Path(folder)))
    return tables


def peers_of(options: Options, *, quick: bool) -> tuple[str, ...]:
    if options.packages is None:
        return BUILT_IN
    return tuple(name for name in PEERS if not (quick and name in SLOW))


def sizes(folder: Path, options: Options, peers: tuple[str, ...]) -> list[Table]:
    """What a node with the old file fetches to have the new one: by us, and by each peer."""
    ours_table = Table(
        title="Bytes of a difference",
        how="% of the new file, exact. Wire: payload (table sets in it), index and manifest: all that a node fetches. "
        "Bound: the entropy given the base's exponent bin and three classes of rows, which are not counted in it. "
        "Every file is rebuilt from the fetched bytes and compared.",
        columns=(
            *("pair", "raw MB", "payload %", "wire %", "payload of bound", "index + manifest bytes", "forms"),
            *("at most full + 1 %", "best peer", "its %", "verdict"),
        ),
    )
    peer_table = Table(
        title="Bytes of others",
        how="% of the new file, on the same pairs in the same run. Each is undone and compared where that is cheap.",
        columns=("pair", "wire", *peers),
    )
    for files in pairs(folder, checkpoints=options.checkpoints, size=options.size, names=options.names):
        with tempfile.TemporaryDirectory(dir=folder) as own:
            ours = differ(files, Path(own) / "pair")
        found = measured(files.old, files.new, peers, options.packages)
        print(f"{files.name}: {ours.wire} of {ours.raw} bytes", file=sys.stderr, flush=True)  # this takes a while
        ours_table.add(files.name, *_cells(ours, found))
        shares = (None if found[name] is None else 100 * (found[name] or 0) / ours.raw for name in peers)
        peer_table.add(files.name, 100 * ours.wire / ours.raw, *shares)
    return [ours_table, peer_table]


def _cells(ours: Ours, peers: dict[str, int | None]) -> tuple[Cell, ...]:
    name, best = min(((name, size) for name, size in peers.items() if size is not None), key=lambda one: one[1])
    if ours.wire < best:
        verdict = f"ahead of all by {1 - ours.wire / best:.1%}"
    else:
        lead = f"payload ahead by {1 - ours.payload / best:.1%}, wire " if ours.payload < best else ""
        near = "within" if ours.is_near(best) else "BEYOND"
        verdict = f"{lead}behind by {ours.wire - best} bytes, {near} index + manifest + 1 %"
    return (
        ours.raw / 1e6,
        100 * ours.payload / ours.raw,
        100 * ours.wire / ours.raw,
        ours.payload / ours.bound if ours.bound else None,
        ours.index + ours.manifest,
        ", ".join(f"{form} {size}" for form, size in ours.forms.items()) or "none",
        "yes" if ours.is_within_full else "NO",
        name,
        100 * best / ours.raw,
        verdict,
    )


def _measured_files(folder: Path, options: Options) -> list[Files]:
    """bf16 and int8 of one pair, that stay while speeds are taken."""
    if options.checkpoints is not None:
        old, new = (options.checkpoints / f"{step}.safetensors" for step in STEPS["P1"])
        bf16 = Files(name="P1 bf16", old=old, new=new, is_real=True)
    else:
        (made,) = pairs(folder, checkpoints=None, size=options.size, names=("fine-tune",))
        bf16 = Files(name="fine-tune bf16", old=folder / "old-bf16", new=folder / "new-bf16")
        made.old.rename(bf16.old)
        made.new.rename(bf16.new)
    old, new = (
        write(folder / f"{age}-int8.safetensors", quantized(read(path)))
        for age, path in (("old", bf16.old), ("new", bf16.new))
    )
    return [bf16, Files(name=bf16.name.replace("bf16", "int8"), old=old, new=new, is_real=bf16.is_real)]
