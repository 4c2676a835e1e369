"""Tenants at a real node, over real HTTP: nobody gets another's answer, behind the node neither; and one execution for
many identical calls."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from cloud.config import GatewayConfig, WorkerConfig
from cloud.gateway import Gateway
from cloud.worker import Worker
from common.errors import ConfigError, TargetUnreachable, Unauthenticated
from common.telemetry.events import BatchDone
from common.transport.grpc_server import serve_grpc
from common.transport.servers import ServerOptions
from common.transport.tenants import TenantOptions
from edge import AsyncClient, Client, Node, NodeConfig, StaticModel
from tests.bundles import forward, write_bundle
from tests.common.transport.fakes import FakeTarget, plane

X = np.array([[1.0, 2.0]], np.float32)
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}
LISTEN = ServerOptions(http_port=0, grpc_port=0)


def tenant(name: str, *keys: str, may_act_for: tuple[str, ...] = ()) -> TenantOptions:
    digests = tuple(hashlib.sha256(key.encode()).hexdigest() for key in keys)
    return TenantOptions(name=name, key_sha256=digests, may_act_for=may_act_for)


TENANTS = (tenant("acme", "acme-1", "acme-2"), tenant("globex", "globex-1"))


def key_file(folder: Path, key: str) -> str:
    file = folder / f"{key}.key"
    file.touch(mode=0o600)
    file.write_text(f"{key}\n")
    return str(file)


def node_config(tmp_path: Path, **options: Any) -> NodeConfig:
    return NodeConfig(name="node", state_dir=str(tmp_path / "state"), server=LISTEN, **options)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle", max_batch=4)


async def test_two_tenants_with_the_same_body_are_two_executions(tmp_path: Path, bundle: Path) -> None:
    batches: list[BatchDone] = []
    config = node_config(tmp_path, tenants=TENANTS, models=(StaticModel(bundle=str(bundle), version="1"),))
    node = Node(config, on_event=lambda event: batches.append(event) if isinstance(event, BatchDone) else None)
    targets = []
    async with node, aiohttp.ClientSession(node.endpoint()["http"]) as session:
        for key in ("acme-1", "acme-1", "acme-2", "globex-1", "globex-1"):
            headers = {"Authorization": f"Bearer {key}", "x-outrider-tenant": "acme"}
            async with session.post("/v2/models/linear/infer", json=BODY, headers=headers) as reply:
                assert reply.status == 200
                targets.append(reply.headers["x-outrider-target"])
        in_process = await node.infer("linear", {"x": X})
    assert targets == ["edge", "cache", "cache", "edge", "cache"]
    assert in_process.stamp.target == "edge"  # the application's own calls are a tenant of their own
    assert len(batches) == 3


async def test_many_identical_calls_at_once_are_one_execution_per_tenant(tmp_path: Path, bundle: Path) -> None:
    batches: list[BatchDone] = []
    config = node_config(tmp_path, tenants=TENANTS, models=(StaticModel(bundle=str(bundle), version="1"),))
    node = Node(config, on_event=lambda event: batches.append(event) if isinstance(event, BatchDone) else None)
    async with node, AsyncExitStack() as stack:
        address = node.endpoint()["grpc"]
        clients = [await stack.enter_async_context(AsyncClient(address, api_key=k)) for k in ("acme-1", "globex-1")]
        answers = await asyncio.gather(*(client.infer("linear", {"x": X}) for _ in range(40) for client in clients))
    assert sum(batch.items for batch in batches) == 2
    assert Counter(answer.target for answer in answers) == {"edge": 2, "cache": 78}
    for answer in answers:
        np.testing.assert_allclose(answer.outputs["logits"], forward(X), rtol=1e-6)


async def test_node_gateway_and_worker_each_ask_for_a_key_and_the_call_passes(tmp_path: Path, bundle: Path) -> None:
    worker_config = WorkerConfig(
        name="worker",
        server=ServerOptions(grpc_port=0),
        models=(StaticModel(bundle=str(bundle), version="9"),),
        tenants=(tenant("gateway", "gateway-key", may_act_for=("*",)),),
    )
    async with Worker(worker_config) as worker:
        gateway_config = GatewayConfig(
            workers=(worker.endpoint()["grpc"],),
            server=ServerOptions(grpc_port=0),
            probe_every_s=0.05,
            tenants=(tenant("kitchen", "node-key", may_act_for=("acme", "globex")),),
            api_key_file=key_file(tmp_path, "gateway-key"),
        )
        async with Gateway(gateway_config) as gateway:
            assert gateway.dataplane.is_ready()
            address = gateway.endpoint()["grpc"]
            config = node_config(
                tmp_path, tenants=TENANTS, gateway=address, api_key_file=key_file(tmp_path, "node-key")
            )
            async with Node(config) as node, AsyncClient(node.endpoint()["grpc"], api_key="acme-1") as client:
                answer = await client.infer("linear", {"x": X})
                assert (answer.target, answer.by, answer.version) == ("cloud", "worker", "9")
                assert (await client.metadata("linear")).versions == ("9",)
            async with Node(node_config(tmp_path, gateway=address)) as keyless:
                with pytest.raises(TargetUnreachable, match="api_key_file"):
                    await keyless.infer("linear", {"x": X})


async def test_behind_the_node_each_call_is_still_its_tenants(tmp_path: Path) -> None:
    target = FakeTarget(name="cloud")
    kitchen = tenant("kitchen", "node-key", may_act_for=("*",))
    async with serve_grpc(plane(target), tenants=(kitchen,)) as gateway:
        config = node_config(
            tmp_path, tenants=TENANTS, gateway=gateway.addresses[0], api_key_file=key_file(tmp_path, "node-key")
        )
        async with Node(config) as node:
            for key in ("acme-1", "globex-1"):
                async with AsyncClient(node.endpoint()["grpc"], api_key=key) as client:
                    await client.infer("echo", {"x": X})
            await node.infer("echo", {"x": X})
    assert [request.context.tenant for request in target.requests] == ["acme", "globex", "kitchen"]


async def test_the_clients_key_comes_from_its_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    target = FakeTarget()
    async with serve_grpc(plane(target), tenants=TENANTS) as server:
        address = server.addresses[0]
        async with AsyncClient(address) as client:
            with pytest.raises(Unauthenticated, match="no API key"):
                await client.infer("echo", {"x": X})
        monkeypatch.setenv("OUTRIDER_API_KEY", "globex-1")
        async with AsyncClient(address) as client:
            await client.infer("echo", {"x": X})
        with Client(address, api_key="acme-2") as blocking:
            await asyncio.to_thread(blocking.infer, "echo", {"x": X})
            assert "acme-2" not in repr(blocking) + repr(vars(blocking))
    assert [request.context.tenant for request in target.requests] == ["globex", "acme"]


def test_a_key_that_cannot_travel_is_refused_unseen() -> None:
    with pytest.raises(ConfigError, match="api_key") as caught:
        AsyncClient("127.0.0.1:1", api_key="se cret\n")
    assert "cret" not in str(caught.value)


async def test_a_node_whose_key_file_is_open_to_others_does_not_start(tmp_path: Path) -> None:
    file = Path(key_file(tmp_path, "node-key"))
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        async with Node(node_config(tmp_path, gateway="127.0.0.1:1", api_key_file=str(file))):
            pass
