"""A live node (and a cloud behind it) whose engine is in the test's hand, and calls to it as strangers make them.

Real servers on free ports; only the engine is a stand-in, which can be held.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cloud.config import GatewayConfig, WorkerConfig
from cloud.gateway import Gateway
from cloud.worker import Worker
from common.bundle import ModelConfig
from common.request import Priority
from common.serving.engine import Batch, Outputs
from common.serving.latency import LatencyModel
from common.serving.repository import Installed
from common.telemetry.events import Hook, ignore
from common.tensors import TensorSpec
from common.transport.servers import ServerOptions
from edge import CacheOptions, Node, NodeConfig
from hardware.engines.base import gather, scatter
from hardware.serving import LocalServing
from tests.fakes import FakeEngine, loaded

MODEL = "held"
CONFIG = ModelConfig(
    name=MODEL,
    task="classification",
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 2)),),
    outputs=(
        TensorSpec(name="logits", datatype="FP32", shape=(-1, 2)),
        TensorSpec(name="half", datatype="FP32", shape=(-1, 2)),
    ),
    max_batch=8,
)


@dataclass
class HeldEngine(FakeEngine):
    """Answers logits = 2 x and half = x / 2, the whole batch at once. `hold` keeps every batch until `let_go`."""

    seen: list[list[float]] = field(default_factory=list)  # the rows that were run

    def run(self, batch: Batch) -> list[Outputs | Exception]:
        x = gather(batch)["x"]
        self.seen += x.tolist()
        super().run(batch)
        return scatter({"logits": x * np.float32(2), "half": x / np.float32(2)}, batch)

    def warm(self) -> LatencyModel:
        return LatencyModel(self.base_s, self.per_row_s, observed_at=time.monotonic())

    def hold(self) -> None:
        self.gate = threading.Event()

    def let_go(self) -> None:
        if self.gate is not None:
            self.gate.set()


def put(local: LocalServing, engine: FakeEngine, version: str = "1") -> None:
    """Makes `engine` the one that serves `MODEL`."""
    installed = Installed(model=MODEL, version=version, folder=Path("nowhere"), variant="full", engine="fake")
    local.repository.activate(loaded(engine, version, CONFIG), installed)


def node_config(folder: Path, **options: Any) -> NodeConfig:
    options.setdefault("cache", CacheOptions(enabled=False))
    options.setdefault(
        "server",
        ServerOptions(
            http_port=0, grpc_port=0, http_uds=str(folder / "node-http.sock"), grpc_uds=str(folder / "node-grpc.sock")
        ),
    )
    folder.mkdir(exist_ok=True)
    return NodeConfig(name="node", state_dir=str(folder / "state"), drain_s=5.0, **options)


@asynccontextmanager
async def held_node(
    folder: Path, *, on_event: Hook = ignore, base_s: float = 0.0, **options: Any
) -> AsyncIterator[tuple[Node, HeldEngine]]:
    """A node that serves `MODEL` version 1, and its engine, which thinks that it takes `base_s`."""
    engine = HeldEngine(base_s=base_s)
    async with Node(node_config(folder, **options), on_event=on_event) as node:
        put(node.local, engine)
        engine.base_s = 0.0
        try:
            yield node, engine
        finally:
            engine.let_go()


@dataclass
class Cloud:
    gateway: Gateway
    worker: Worker
    engine: HeldEngine

    @property
    def address(self) -> str:
        return str(self.gateway.endpoint()["grpc"])


@asynccontextmanager
async def held_cloud(*, on_event: Hook = ignore) -> AsyncIterator[Cloud]:
    """A gateway and a worker that serves `MODEL` version 1. `on_event` hears the worker."""
    engine, listen = HeldEngine(), ServerOptions(grpc_port=0)
    async with Worker(WorkerConfig(name="worker", server=listen, drain_s=5.0), on_event=on_event) as worker:
        put(worker.local, engine)
        config = GatewayConfig(
            workers=(worker.endpoint()["grpc"],),
            server=ServerOptions(grpc_port=0, http_port=0),
            probe_every_s=0.05,
            drain_s=5.0,
        )
        async with Gateway(config) as gateway:
            await until(lambda: bool(gateway.members.pool.healthy))
            try:
                yield Cloud(gateway, worker, engine)
            finally:
                engine.let_go()


def queued(process: Node | Worker) -> int:
    """Rows that wait for the device."""
    return process.local.device.rows_ahead(Priority.OFFLINE)


async def until(is_so: Callable[[], bool], within_s: float = 10.0) -> float:
    """Waits, and says for how long."""
    start = time.monotonic()
    async with asyncio.timeout(within_s):
        while not is_so():
            await asyncio.sleep(0.002)
    return time.monotonic() - start


def body(*rows: tuple[float, float], **more: Any) -> dict[str, Any]:
    """An infer request as JSON."""
    values = rows or ((1.0, 2.0),)
    flat = [value for row in values for value in row]
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(values), 2], "data": flat}], **more}


INFER = f"/v2/models/{MODEL}/infer"
