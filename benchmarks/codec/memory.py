"""Peak memory of rebuilding a file from its predecessor and a pack, in a process of its own.

`python -m benchmarks.codec.memory OLD STORE OUT` prints bytes. The base is open and the code is loaded before it is
counted. `billion` is a pair for it: two files of a thousand million bf16 parameters, of which half move.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.codec.files import to_bf16, to_float, write_each
from benchmarks.codec.ours import differ
from benchmarks.codec.pairs import Files
from benchmarks.codec.peers import ROOT
from benchmarks.report import Table
from sync.diff.file_release import opened
from sync.diff.rebuild import rebuild
from sync.store import Store

_SIDE = 4096  # rows and columns of a matrix
_MATRICES = 60
_STRIDE = 7919


def table(chosen: list[Files], folder: Path) -> Table:
    """`folder`: on a disk with room for each file, twice."""
    made = Table(
        title="Peak memory of rebuilding",
        how="Resident memory of a fresh process at its highest while it rebuilds the file, less what it had right "
        "before, with the base open and all code loaded.",
        columns=("pair", "raw MB", "MB before", "peak MB above"),
    )
    for files in chosen:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            differ(files, Path(own) / "pair")
            store, out = Path(own) / "pair/store", Path(own) / "again"
            command = (sys.executable, "-m", "benchmarks.codec.memory", files.old, store, out)
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
        before, above = map(int, done.stdout.split())
        made.add(files.name, files.new.stat().st_size / 1e6, before / 1e6, above / 1e6)
    return made


def billion(folder: Path, matrices: int = _MATRICES) -> Files:
    """A quarter of the matrices move as in a fine-tune, a quarter in few elements, the others not at all."""
    random = np.random.default_rng(0)
    block = 0.04 * random.standard_normal((_SIDE, _SIDE), np.float32)
    step = random.standard_normal((_SIDE, _SIDE), np.float32)
    words = to_bf16(block)
    kinds = {f"matrix.{number:02}": ("uint16", (_SIDE, _SIDE)) for number in range(matrices)}
    rates = (1e-4, 1e-6, 0.0, 0.0)

    def old(name: str) -> NDArray[Any]:
        """The same numbers for all, each time from another place on: no two slabs are the same."""
        return np.roll(words, _STRIDE * int(name[-2:]))

    def new(name: str) -> NDArray[Any]:
        number = int(name[-2:])
        rate = rates[number % len(rates)]
        return to_bf16(to_float(old(name)) + np.float32(rate) * np.roll(step, number)) if rate else old(name)

    return Files(
        name="1 B parameters",
        old=write_each(folder / "old-billion.safetensors", kinds, old),
        new=write_each(folder / "new-billion.safetensors", kinds, new),
    )


def main(old: Path, store: Path, out: Path) -> None:
    fetched = Store(store)
    (manifest,) = (path for path in (store / "targets").rglob("*") if path.is_file())
    with opened(old, version=1) as base:
        declared = manifest.read_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        before = _status("VmRSS")
        rebuild(base, declared, fetched, out)
    print(before, _status("VmHWM") - before)


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
