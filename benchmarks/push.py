"""Bytes and seconds from publish to served: `python -m benchmarks push`.

Digits in four stages of training: v1 from nothing, v2 (every layer has moved), v3 (the last layer alone), v4. One node
with `cpu-int8` and one worker with `full`, sync service and broker, all in this process over sockets; each stage is
released once, by the publisher that `outrider publish` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path

import uvloop

from benchmarks import models
from benchmarks.report import Scale, Table, main
from cloud.config import WorkerConfig
from cloud.worker import Worker
from common.bundle import Bundle, files_of
from common.serving.repository import Repository
from edge import CacheOptions, Node, NodeConfig
from hardware.demo.digits import Stage
from hardware.install import EngineOptions
from sync.agent.running import SyncOptions
from sync.broker import broker
from sync.disk import write_atomic
from sync.events import SlabsFetched
from sync.publisher import Publisher
from sync.service import ServiceConfig, service
from sync.store import Store
from sync.trust.keys import Keys
from sync.trust.repository import Repository as Trust

STAGES: tuple[Stage, ...] = ("v1", "v2", "v3", "v4")
PATIENCE_S = 60.0
_LOOK_S = 0.002


class Fetched:
    """What one process has fetched: a hook on its events."""

    def __init__(self) -> None:
        self.bytes = self.slabs = 0

    def __call__(self, event: object) -> None:
        if isinstance(event, SlabsFetched):
            self.bytes += sum(event.bytes_by_form.values())
            self.slabs += event.fetched

    def take(self) -> tuple[int, int]:
        """Bytes and slabs since the last time."""
        taken = self.bytes, self.slabs
        self.bytes = self.slabs = 0
        return taken


def run(scale: Scale) -> list[Table]:
    stages = STAGES[1:3] if scale.quick else STAGES
    built = models.digits(scale.bundles, *stages)
    table = Table(
        title="A push, from publish to served",
        how="Each release once. Seconds from the release's signature to the first moment when the process serves it: "
        "hint, fetch, verification, golden gate, warm-up, swap. Bytes as they came over the wire.",
        columns=(
            "release",
            "process",
            "publish s",
            "served after s",
            "bytes fetched",
            "slabs",
            "bytes of the files",
            "%",
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(_measure(Path(folder), dict(zip(stages, built, strict=True)), table))
    return [table]


async def _measure(folder: Path, built: dict[Stage, models.Model], table: Table) -> None:
    store = Store(folder / "store")
    with store.lock():
        root = Trust(store, Keys.create(folder / "keys")).create()
    write_atomic(folder / "root.json", root)
    publisher = Publisher(store, Keys(folder / "keys"))
    fetched = {"node": Fetched(), "worker": Fetched()}
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        hints = await enter(broker())
        source = await enter(service(ServiceConfig(store=str(folder / "store"), broker=hints)))
        sync = SyncOptions(source=source, root=str(folder / "root.json"), broker=hints, min_gap_s=0.0, probation_s=0.0)
        alone = CacheOptions(enabled=False)
        edge = NodeConfig(state_dir=str(folder / "node"), sync=sync, cache=alone, engine=EngineOptions(threads=1))
        full = EngineOptions(variants=("full",), engines=("onnxruntime",), threads=1)
        cloud = WorkerConfig(state_dir=str(folder / "worker"), sync=sync, engine=full)
        node = await enter(Node(edge, on_event=fetched["node"]))
        worker = await enter(Worker(cloud, on_event=fetched["worker"]))
        repositories = {"node": node.local.repository, "worker": worker.local.repository}
        await asyncio.sleep(1.0)  # connections to the broker are up, first polls are over
        for stage, model in built.items():
            started = time.perf_counter()
            published = await asyncio.to_thread(publisher.publish, model.bundle)
            signed = time.perf_counter()
            waits = [_served(repository, model.name, published.version) for repository in repositories.values()]
            served = dict(zip(repositories, await asyncio.gather(*waits), strict=True))
            for name, variant in (("node", "cpu-int8"), ("worker", "full")):
                size, slabs = fetched[name].take()
                whole = _file_bytes(model.bundle, variant)
                seconds = (signed - started, served[name] - signed)
                table.add(stage, f"{name}, {variant}", *seconds, size, slabs, whole, f"{size / whole:.1%}")


async def _served(repository: Repository, model: str, version: str) -> float:
    """The moment from which this version answers. Raises `TimeoutError`."""
    async with asyncio.timeout(PATIENCE_S):
        while (loaded := repository.current(model)) is None or loaded.version != version:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
    return time.perf_counter()


def _file_bytes(folder: Path, variant: str) -> int:
    """What a node with this variant has on its disk."""
    bundle = Bundle.open(folder)
    names = files_of(bundle.spec, bundle.variant(variant), "onnxruntime")
    return sum(bundle.file(name).stat().st_size for name in names)


if __name__ == "__main__":
    main(run, __doc__)
