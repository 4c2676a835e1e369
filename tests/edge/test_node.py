"""The node as its callers see it: a real node, a real gateway and a real worker, on loopback."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from cloud.config import GatewayConfig, WorkerConfig
from cloud.gateway import Gateway
from cloud.worker import Worker
from common.errors import EngineError, ModelNotFound, ModelNotReady, NotFound, OutsideProfile, TargetUnreachable
from common.request import Priority, Privacy, Reason
from common.serving.latency import Line
from common.telemetry.events import RequestDone
from common.transport.servers import ServerOptions
from edge import CacheOptions, Node, NodeConfig, StaticModel
from hardware.build.echo import write_echo
from hardware.engines.drill import Drill
from hardware.install import EngineOptions
from tests.bundles import WEIGHT, forward, write_bundle

X = np.array([[1.0, 2.0]], np.float32)


@dataclass
class Cloud:
    """A gateway with one worker that serves `linear` version 9."""

    address: str
    worker: Worker
    asked: list[RequestDone]


@asynccontextmanager
async def cloud(bundle: Path, version: str = "9") -> AsyncIterator[Cloud]:
    asked: list[RequestDone] = []
    grpc = ServerOptions(grpc_port=0)
    models = (StaticModel(bundle=str(bundle), version=version),)
    worker = Worker(
        WorkerConfig(name="worker", server=grpc, models=models),
        on_event=lambda event: asked.append(event) if isinstance(event, RequestDone) else None,
    )
    async with worker:
        address = worker.endpoint()["grpc"]
        async with Gateway(GatewayConfig(workers=(address,), server=grpc, probe_every_s=0.05)) as gateway:
            async with asyncio.timeout(5):
                while not gateway.dataplane.is_ready():
                    await asyncio.sleep(0.01)
            yield Cloud(gateway.endpoint()["grpc"], worker, asked)


def node_config(tmp_path: Path, *, bundle: Path | None = None, **options: Any) -> NodeConfig:
    models = (StaticModel(bundle=str(bundle), version="1"),) if bundle else ()
    options.setdefault("cache", CacheOptions(enabled=False))
    return NodeConfig(name="node", state_dir=str(tmp_path / "state"), models=models, **options)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle", max_batch=4)


async def test_a_call_in_process_is_answered_on_the_edge_and_stamped(tmp_path: Path, bundle: Path) -> None:
    async with Node(node_config(tmp_path, bundle=bundle)) as node:
        answer = await node.infer("linear", {"x": X}, timeout_s=5.0)
    np.testing.assert_allclose(answer.outputs["logits"], forward(X), rtol=1e-6)
    stamp = answer.stamp
    assert (stamp.target, stamp.by, stamp.version, stamp.reason) == ("edge", "node", "1", None)


async def test_without_an_engine_the_cloud_answers(tmp_path: Path, bundle: Path) -> None:
    async with cloud(bundle) as behind, Node(node_config(tmp_path, gateway=behind.address)) as node:
        answer = await node.infer("linear", {"x": X})
        np.testing.assert_allclose(answer.outputs["logits"], forward(X), rtol=1e-6)
        stamp = answer.stamp
        assert (stamp.target, stamp.by, stamp.version) == ("cloud", "worker", "9")
        assert stamp.reason is Reason.NO_ENGINE
        assert behind.asked[0].reason is Reason.NO_ENGINE  # the worker's metrics say the same word
        with pytest.raises(NotFound, match="known models: linear"):
            await node.infer("nope", {"x": X})


async def test_a_batch_beyond_the_declared_one_goes_to_the_cloud(tmp_path: Path, bundle: Path) -> None:
    alone = node_config(tmp_path, bundle=bundle, engine=EngineOptions(max_batch={"linear": 2}))
    x = np.ones((3, 2), np.float32)
    async with cloud(bundle) as behind, Node(dataclasses.replace(alone, gateway=behind.address)) as node:
        answer = await node.infer("linear", {"x": x})
        assert (answer.stamp.target, answer.stamp.reason) == ("cloud", Reason.OUTSIDE_PROFILE)
        assert (await node.infer("linear", {"x": x[:2]})).stamp.target == "edge"
    async with Node(alone) as node:
        with pytest.raises(OutsideProfile, match="at most 2"):
            await node.infer("linear", {"x": x})


async def test_an_engine_that_fails_or_is_too_slow_leaves_the_call_to_the_cloud(tmp_path: Path, bundle: Path) -> None:
    async with cloud(bundle) as behind, Node(node_config(tmp_path, bundle=bundle, gateway=behind.address)) as node:
        loaded = node.local.repository.current("linear")
        assert loaded is not None
        loaded.latency.begin(Line(base_s=60.0, per_row_s=0.0))
        answer = await node.infer("linear", {"x": X})
        assert (answer.stamp.target, answer.stamp.reason) == ("cloud", Reason.DEADLINE)
        assert (await node.infer("linear", {"x": X}, priority=Priority.OFFLINE)).stamp.target == "edge"
        loaded.latency.begin(Line(base_s=0.0, per_row_s=0.0))
        loaded.engine.close()
        answer = await node.infer("linear", {"x": X})
        assert (answer.stamp.target, answer.stamp.reason) == ("cloud", Reason.ENGINE_ERROR)


async def test_device_only_never_leaves(tmp_path: Path, bundle: Path) -> None:
    private = Privacy.DEVICE_ONLY
    async with cloud(bundle) as behind, Node(node_config(tmp_path, bundle=bundle, gateway=behind.address)) as node:
        assert (await node.infer("linear", {"x": X}, privacy=private)).stamp.target == "edge"
        with pytest.raises(OutsideProfile):
            await node.infer("linear", {"x": np.ones((5, 2), np.float32)}, privacy=private)
        await node.dataplane.catalog.unload("linear")
        with pytest.raises(ModelNotReady):
            await node.infer("linear", {"x": X}, privacy=private)
        with pytest.raises(ModelNotFound):
            await node.infer("nope", {"x": X}, privacy=private)
        assert behind.asked == []


async def test_a_pinned_version_is_answered_by_whoever_has_it(tmp_path: Path, bundle: Path) -> None:
    async with cloud(bundle) as behind, Node(node_config(tmp_path, bundle=bundle, gateway=behind.address)) as node:
        assert (await node.infer("linear", {"x": X}, pin="1")).stamp.target == "edge"
        answer = await node.infer("linear", {"x": X}, pin="9")
        assert (answer.stamp.target, answer.stamp.version) == ("cloud", "9")


async def test_an_answer_of_the_cloud_is_cached_under_the_version_that_gave_it(tmp_path: Path) -> None:
    old, new = write_bundle(tmp_path / "old"), write_bundle(tmp_path / "new", weight=2 * WEIGHT)
    config = node_config(tmp_path, bundle=old, cache=CacheOptions(enabled=True))
    async with cloud(new, version="2") as behind, Node(dataclasses.replace(config, gateway=behind.address)) as node:
        loaded = node.local.repository.current("linear")
        assert loaded is not None
        loaded.latency.begin(Line(base_s=60.0, per_row_s=0.0))
        assert (await node.infer("linear", {"x": X})).stamp.version == "2"
        loaded.latency.begin(Line(base_s=0.0, per_row_s=0.0))
        answer = await node.infer("linear", {"x": X})  # version 1 serves here: the other answer is not its own
        assert (answer.stamp.target, answer.stamp.version) == ("edge", "1")
        np.testing.assert_allclose(answer.outputs["logits"], forward(X), rtol=1e-6)
        pinned = await node.infer("linear", {"x": X}, pin="2")
        assert (pinned.stamp.target, pinned.stamp.version) == ("cache", "2")
        np.testing.assert_allclose(pinned.outputs["logits"], forward(X, 2 * WEIGHT), rtol=1e-6)


async def test_with_the_cloud_gone_the_edge_serves_and_the_rest_is_503(tmp_path: Path, bundle: Path) -> None:
    config = node_config(tmp_path, bundle=bundle, gateway="127.0.0.1:9", server=ServerOptions(http_port=0))
    async with Node(config) as node, aiohttp.ClientSession(node.endpoint()["http"]) as session:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
        async with session.post("/v2/models/linear/infer", json={"inputs": [tensor]}) as response:
            assert response.status == 200
        async with session.post("/v2/repository/models/linear/unload") as response:
            assert response.status == 200
        start = time.monotonic()
        async with session.post("/v2/models/linear/infer", json={"inputs": [tensor]}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
        assert time.monotonic() - start < 2.0
        with pytest.raises(TargetUnreachable):
            await node.infer("linear", {"x": X})
        async with session.post("/v2/repository/models/linear/load") as response:
            assert response.status == 200
        async with session.post("/v2/models/linear/infer", json={"inputs": [tensor]}) as response:
            assert response.headers["x-outrider-target"] == "edge"


async def test_leaving_the_node_waits_for_calls_in_progress(tmp_path: Path, bundle: Path) -> None:
    node = Node(node_config(tmp_path, bundle=bundle))
    async with node:
        calls = [asyncio.create_task(node.infer("linear", {"x": X})) for _ in range(20)]
        await asyncio.sleep(0)
    assert not node.dataplane.is_ready()
    answers = await asyncio.gather(*calls)
    assert len(answers) == 20


async def test_an_engine_that_hangs_is_opened_anew_and_the_second_time_left_alone(tmp_path: Path) -> None:
    bundle = write_echo(tmp_path / "echo")
    drill = Drill(fault="hang", every=3, hang_s=4.0, healthy_batches=1)  # the golden set is the first batch
    engine = EngineOptions(variants=("full",), engines=("synthetic",), synthetic={"echo": drill}, hang_after_s=1.0)
    x = {"x": np.ones((1, 16), np.float32)}
    async with Node(node_config(tmp_path, bundle=bundle, engine=engine)) as node:
        for _ in range(2):
            assert (await node.infer("echo", x)).stamp.target == "edge"
        started = time.monotonic()
        with pytest.raises(EngineError, match="has not come back"):
            await node.infer("echo", x)
        assert 1.0 <= time.monotonic() - started < 3.5  # before the engine comes back
        async with asyncio.timeout(10):
            while node.local.repository.current("echo") is None:
                await asyncio.sleep(0.01)
        for _ in range(2):  # of three: nothing but the callers' batches went through this one
            assert (await node.infer("echo", x)).stamp.target == "edge"
        await node.infer("echo", x)
        with pytest.raises(EngineError, match="has not come back"):
            await node.infer("echo", x)
        with pytest.raises(ModelNotReady, match="did not come back, again"):
            await node.infer("echo", x)
        assert b'outrider_engine_hangs_total{model="echo"} 2.0' in node.metrics.render()
        await node.dataplane.catalog.load("echo")  # an operator's word
        assert (await node.infer("echo", x)).stamp.target == "edge"
