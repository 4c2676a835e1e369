"""What a call over the wire costs the server, over a bare echo in the same library: `python -m benchmarks transports`.

A node in a process of its own echoes with the `echo` engine; beside it aiohttp and grpc.aio echo the same bodies. The
same client calls both in turn. CPU is that of the server's process, at 64 calls in flight; latency is one caller's.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks import wire
from benchmarks.processes import OUTRIDER, cpu_s, serving, toml
from benchmarks.report import Scale, Table, main
from common.tensors import Array
from hardware.build.echo import write_echo

CONCURRENCY = 64
SMALL, LARGE = (16,), (3, 224, 224)


@dataclass(frozen=True, slots=True)
class Body:
    """One kind of call: how its bytes are made and which server takes it."""

    name: str
    row: tuple[int, ...]
    make: Callable[[str, Array], bytes]
    kind: str  # http or grpc


BODIES = (
    Body("HTTP JSON", SMALL, wire.json_request, "http"),
    Body("HTTP binary", SMALL, wire.binary_request, "http"),
    Body("gRPC", SMALL, wire.grpc_request, "grpc"),
    Body("HTTP binary", LARGE, wire.binary_request, "http"),
    Body("gRPC", LARGE, wire.grpc_request, "grpc"),
)


@dataclass(frozen=True, slots=True)
class Server:
    pid: int
    addresses: dict[str, str]  # TCP and Unix


@dataclass(slots=True)
class Figures:
    cpu_us: float
    per_s: float
    p50_us: float
    p99_us: float


def run(scale: Scale) -> list[Table]:
    table = Table(
        title="Transports over a bare echo",
        how=(
            f"CPU of the server's process per call and calls per second at {CONCURRENCY} calls in flight, latency of "
            "one caller; ours / bare, medians of rounds in which the two alternate. Bare HTTP reads and writes JSON "
            "with orjson (binary goes back as it came), bare gRPC parses and answers the message. Both run on uvloop."
        ),
        columns=(
            *("call", "row", "via", "CPU us", "bare CPU us", "ratio", "calls/s", "bare calls/s"),
            *("p50 us", "bare p50 us", "p99 us", "bare p99 us"),
        ),
    )
    uvloop.run(_measure(scale, table))
    return [table]


async def _measure(scale: Scale, table: Table) -> None:
    in_flight = scale.pick(CONCURRENCY, 4)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ours, bare = _servers(Path(folder), stack)
        for body in BODIES:
            rows = np.random.default_rng(1).standard_normal((1, *body.row)).astype(np.float32)
            request = body.make(_model(body.row), rows)
            count = scale.pick(3000, 64) if body.row == SMALL else scale.pick(400, 16)
            for via in ("TCP", "Unix"):
                sides: list[list[Figures]] = [[], []]
                for _ in range(scale.pick(5, 1)):
                    for side, server in zip(sides, (ours[body.kind], bare[body.kind]), strict=True):
                        side.append(await _once(body.kind, server, via, request, count, in_flight))
                mine, floor = map(_median, sides)
                table.add(
                    body.name,
                    "x".join(map(str, (1, *body.row))),
                    via,
                    *(mine.cpu_us, floor.cpu_us, f"{mine.cpu_us / floor.cpu_us:.2f} x", mine.per_s, floor.per_s),
                    *(mine.p50_us, floor.p50_us, mine.p99_us, floor.p99_us),
                )


async def _once(kind: str, server: Server, via: str, request: bytes, count: int, in_flight: int) -> Figures:
    async with _calls(kind, server.addresses[via], request, in_flight) as calls:
        await wire.latencies(calls, len(calls))
        alone = await wire.latencies(calls[:1], count // 8)
        cpu, start = cpu_s(server.pid), time.perf_counter()
        done = len(await wire.latencies(calls, count))
        seconds, cpu = time.perf_counter() - start, cpu_s(server.pid) - cpu
    return Figures(cpu / done * 1e6, done / seconds, *(wire.percentile(alone, p) * 1e6 for p in (50, 99)))


@contextlib.asynccontextmanager
async def _calls(kind: str, address: str, request: bytes, in_flight: int) -> AsyncIterator[list[wire.Call]]:
    if kind == "grpc":
        async with wire.grpc_channel(address) as channel:
            yield [wire.grpc_call(channel, request)] * in_flight
        return
    connections = [await wire.http_connection(address) for _ in range(in_flight)]

    try:
        yield [partial(connection.call, request) for connection in connections]
    finally:
        for connection in connections:
            connection.close()


def _servers(folder: Path, stack: contextlib.ExitStack) -> tuple[dict[str, Server], dict[str, Server]]:
    log = folder / "log"
    sockets = {kind: wire.socket_path(folder, kind) for kind in ("http", "grpc")}
    config = echo_node(folder) | {
        "server": {"http_port": 0, "grpc_port": 0, "http_uds": sockets["http"], "grpc_uds": sockets["grpc"]}
    }
    node = stack.enter_context(serving(*OUTRIDER, "edge", "run", "--config", toml(folder, "node", config), log=log))
    ours, bare = {}, {}
    for kind in ("http", "grpc"):
        ours[kind] = _server(node, kind, sockets[kind])
        uds = wire.socket_path(folder, f"bare-{kind}")
        told = stack.enter_context(serving(sys.executable, "-m", "benchmarks.bare", kind, "--uds", uds, log=log))
        bare[kind] = _server(told, kind, uds)
    return ours, bare


def echo_node(folder: Path) -> dict[str, Any]:
    """The configuration of a node that echoes rows of both sizes, without its servers."""
    rows = (SMALL, LARGE)
    bundles = [write_echo(folder / _model(row), name=_model(row), row=row) for row in rows]
    return {
        "cache": {"enabled": False},
        "engine": {"variants": ["full"], "engines": ["echo"]},
        "models": [{"bundle": str(bundle)} for bundle in bundles],
    }


def _model(row: tuple[int, ...]) -> str:
    return f"echo-{'x'.join(map(str, row))}"


def _server(told: dict[str, Any], kind: str, uds: str) -> Server:
    return Server(told["pid"], {"TCP": told[kind], "Unix": f"unix:{uds}" if kind == "grpc" else uds})


def _median(figures: list[Figures]) -> Figures:
    return Figures(
        *(statistics.median(getattr(one, name) for one in figures) for name in ("cpu_us", "per_s", "p50_us", "p99_us"))
    )


if __name__ == "__main__":
    main(run, __doc__)
