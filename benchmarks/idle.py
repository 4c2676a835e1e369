"""What waits costs: idle CPU, memory and threads of each process: `python -m benchmarks idle`.

Nodes without a model, with the demo model, and under 200 calls at once (their threads must stay the same); then every
process of `outrider up`.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks import models, wire
from benchmarks.processes import OUTRIDER, Usage, serving, toml, usage
from benchmarks.report import Scale, Table, main
from benchmarks.system import up
from hardware.build.echo import write_echo

CALLS = 200
SLOW_MS = 2.0  # of a row on the synthetic device: all calls are in flight when the threads are counted


def run(scale: Scale) -> list[Table]:
    table = Table(
        title="Idle processes",
        how=f"After {_settle_s(scale):g} s to settle; CPU over {_watch_s(scale):g} s, in % of one core.",
        columns=("process", "CPU %", "resident MB", "threads"),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _alone(scale, folder, table)
        threads = _under_load(folder)
        if not scale.quick:
            models.photos(scale.bundles)
            models.digits(scale.bundles, "v1")
            with up(folder / "state", scale.bundles) as system:
                time.sleep(_settle_s(scale))
                _watch(scale, {f"up: {process}": pid for process, pid in system.pids.items()}, table)
    return [table, threads]


def _alone(scale: Scale, folder: Path, table: Table) -> None:
    server = {"http_port": 0, "grpc_port": 0}
    config: dict[str, Any] = {"server": server, "state_dir": str(folder / "node"), "cache": {"enabled": True}}
    nodes = {"node without a model": config}
    if not scale.quick:
        bundle = {"bundle": str(models.photos(scale.bundles).bundle)}
        nodes["node with EfficientNet-Lite0, cpu-int8"] = config | {
            "state_dir": str(folder / "with"),
            "models": [bundle],
            "engine": {"threads": 1},
        }
    with contextlib.ExitStack() as stack:
        pids = {}
        for number, (name, one) in enumerate(nodes.items()):
            path = toml(folder, f"node-{number}", one)
            pids[name] = stack.enter_context(serving(*OUTRIDER, "edge", "run", "--config", path, log=folder / "log"))[
                "pid"
            ]
        time.sleep(_settle_s(scale))
        _watch(scale, pids, table)


def _watch(scale: Scale, pids: dict[str, int], table: Table) -> None:
    before, start = {name: usage(pid) for name, pid in pids.items()}, time.perf_counter()
    time.sleep(_watch_s(scale))
    seconds = time.perf_counter() - start
    for name, pid in pids.items():
        now = usage(pid)
        table.add(name, (now.cpu_s - before[name].cpu_s) / seconds * 100, now.rss_mb, now.threads)


def _under_load(folder: Path) -> Table:
    table = Table(
        title=f"Threads of a node before, during and after {CALLS} calls at once",
        how=f"The synthetic engine, {SLOW_MS:g} ms a row: all calls wait when the threads are counted.",
        columns=("transport", "before", "during", "after", "resident MB before", "resident MB after"),
    )
    bundle = write_echo(folder / "slow", name="slow")
    config = {
        "server": {"http_port": 0, "grpc_port": 0},
        "cache": {"enabled": False},
        "models": [{"bundle": str(bundle)}],
        "engine": {"variants": ["full"], "engines": ["synthetic"], "synthetic": {"slow": {"b_ms": SLOW_MS}}},
    }
    path = toml(folder, "slow", config)
    with serving(*OUTRIDER, "edge", "run", "--config", path, log=folder / "log") as told:
        for kind in ("http", "grpc"):
            before, during, after = uvloop.run(_flood(told["pid"], kind, told[kind]))
            table.add(kind, before.threads, during.threads, after.threads, before.rss_mb, after.rss_mb)
    return table


async def _flood(pid: int, kind: str, address: str) -> tuple[Usage, Usage, Usage]:
    row = np.ones((1, 16), np.float32)
    async with contextlib.AsyncExitStack() as stack:
        calls: list[wire.Call] = []
        if kind == "grpc":
            channel = await stack.enter_async_context(wire.grpc_channel(address))
            calls = [wire.grpc_call(channel, wire.grpc_request("slow", row))] * CALLS
        else:
            request = wire.json_request("slow", row)
            for _ in range(CALLS):
                connection = await wire.http_connection(address)
                stack.callback(connection.close)
                calls.append(partial(connection.call, request))
        await calls[0]()
        before = usage(pid)
        flood = asyncio.gather(*(call() for call in calls))
        await asyncio.sleep(CALLS * SLOW_MS / 1000 / 4)
        during = usage(pid)
        await flood
        return before, during, usage(pid)


def _settle_s(scale: Scale) -> float:
    return scale.pick(10, 0) + 0.2


def _watch_s(scale: Scale) -> float:
    return scale.pick(30, 0) + 0.3


if __name__ == "__main__":
    main(run, __doc__)
