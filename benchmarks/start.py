"""Seconds to the first answer: of a node and of the whole system, cold and warm: `python -m benchmarks start`.

A cold start of `outrider up` on a machine with nothing on it builds both demo models first; with `--bundles` kept they
are there, and a first start makes keys and releases only; a warm start finds everything in its state folder.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.processes import OUTRIDER, serving, toml
from benchmarks.report import Scale, Table, main
from benchmarks.system import up


def run(scale: Scale) -> list[Table]:
    table = Table(
        title="Starts",
        how="Seconds from the command to ready (a node: its endpoint file; `up`: every process serves its models).",
        columns=("what", "median s", "lowest", "highest", "starts"),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _nodes(scale, folder, table)
        if not scale.quick:
            _systems(scale, folder, table)
    return [table]


def _nodes(scale: Scale, folder: Path, table: Table) -> None:
    count = scale.pick(5, 1)
    _add(table, "python -c pass (the floor)", [_command(sys.executable, "-c", "pass") for _ in range(count)])
    _add(table, "outrider --help", [_command(*OUTRIDER, "--help") for _ in range(count)])
    config: dict[str, Any] = {"server": {"http_port": 0, "grpc_port": 0}, "cache": {"enabled": False}}
    nodes = {"node without a model": config}
    if not scale.quick:
        bundle = {"bundle": str(models.photos(scale.bundles).bundle)}
        nodes["node with EfficientNet-Lite0, cpu-int8: opened, gated, warm"] = config | {"models": [bundle]}
    for number, (name, one) in enumerate(nodes.items()):
        path = toml(folder, f"node-{number}", one)
        _add(table, name, [_node(path, folder / "log") for _ in range(count)])


def _systems(scale: Scale, folder: Path, table: Table) -> None:
    with up(folder / "cold", folder / "bundles") as first:
        cold = first.ready_s
    firsts: list[float] = []
    warms: list[float] = []
    for number in range(3):
        state = folder / f"state-{number}"
        for seconds in (firsts, warms):
            with up(state, folder / "bundles") as system:
                seconds.append(system.ready_s)
    _add(table, "up, cold: both models are built", [cold])
    _add(table, "up, first start with built models: keys, releases", firsts)
    _add(table, "up, warm", warms)


def _node(config: Path, log: Path) -> float:
    start = time.perf_counter()
    with serving(*OUTRIDER, "edge", "run", "--config", config, log=log):
        return time.perf_counter() - start


def _command(*argv: str) -> float:
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def _add(table: Table, what: str, seconds: list[float]) -> None:
    table.add(what, statistics.median(seconds), min(seconds), max(seconds), len(seconds))


if __name__ == "__main__":
    main(run, __doc__)
