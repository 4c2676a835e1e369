"""A real gateway over real servers that stand in for workers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from cloud.config import GatewayConfig
from cloud.events import HealthChanged, Redispatched
from cloud.gateway import Gateway
from common.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable
from common.request import Context, Privacy, Reason, Request, Response
from common.serving.catalog import ModelState
from common.transport.grpc_client import OipClient
from common.transport.servers import ServerOptions
from tests.cloud.fakes import FakeWorker, fake_worker, free_port

X = np.arange(4, dtype=np.float32).reshape(2, 2)
LISTEN = ServerOptions(http_port=0, grpc_port=0)


def request(model: str = "double", **context: Any) -> Request:
    return Request(model=model, inputs={"x": X}, context=Context(**context))


class Cloud:
    """Two workers and a gateway; each worker can be ended by itself."""

    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}
        self.stacks: dict[str, AsyncExitStack] = {}
        self.events: list[object] = []
        self.ports = {"w1": free_port(), "w2": free_port()}
        self.gateway: Gateway
        self.client: OipClient

    async def start(self, name: str, version: str = "3") -> FakeWorker:
        self.stacks[name] = AsyncExitStack()
        worker = await self.stacks[name].enter_async_context(fake_worker(name, self.ports[name], version))
        self.workers[name] = worker
        return worker

    async def end(self, name: str) -> None:
        await self.stacks.pop(name).aclose()

    async def infer(self, model: str = "double", **context: Any) -> Response:
        return await self.client.infer(request(model, **context))

    async def until(self, healthy: int) -> None:
        async with asyncio.timeout(5):
            while len(self.gateway.members.pool.healthy) != healthy:
                await asyncio.sleep(0.02)


@pytest.fixture
async def cloud() -> AsyncIterator[Cloud]:
    cloud = Cloud()
    async with AsyncExitStack() as stack:
        for name in ("w1", "w2"):
            await cloud.start(name)
        config = GatewayConfig(
            workers=tuple(w.address for w in cloud.workers.values()), server=LISTEN, probe_every_s=0.1, drain_s=1.0
        )
        cloud.gateway = await stack.enter_async_context(Gateway(config, on_event=cloud.events.append))
        cloud.client = await stack.enter_async_context(OipClient(str(cloud.gateway.endpoint()["grpc"])))
        yield cloud
        for name in list(cloud.stacks):
            await cloud.end(name)


async def test_workers_share_the_calls_and_their_stamp_passes(cloud: Cloud) -> None:
    answers = [await cloud.infer(reason=Reason.OVERLOAD) for _ in range(60)]
    for answer in answers:
        np.testing.assert_array_equal(answer.outputs["y"], X * 2)
        stamp = answer.stamp
        assert (stamp.target, stamp.model, stamp.version, stamp.reason) == ("cloud", "double", "3", Reason.OVERLOAD)
    counts = Counter(answer.stamp.by for answer in answers)
    assert set(counts) == {"w1", "w2"}
    assert min(counts.values()) > 10


async def test_one_worker_dies_under_load_and_no_call_fails(cloud: Cloud) -> None:
    async def load() -> list[Response]:
        return [await cloud.infer() for _ in range(100)]

    loads = [asyncio.create_task(load()) for _ in range(4)]
    while cloud.workers["w1"].calls < 20:
        await asyncio.sleep(0.005)
    await cloud.end("w1")
    answers = [answer for task in loads for answer in await task]
    assert len(answers) == 400
    assert answers[-1].stamp.by == "w2"


async def test_a_call_in_progress_moves_to_the_other_worker(cloud: Cloud) -> None:
    call = asyncio.create_task(cloud.infer("slow"))
    async with asyncio.timeout(5):
        while not (busy := [n for n, w in cloud.workers.items() if w.target.started.is_set()]):
            await asyncio.sleep(0.01)
        (first,) = busy
        (other,) = set(cloud.workers) - {first}
        await cloud.end(first)
        await cloud.workers[other].target.started.wait()
    assert [e.member for e in cloud.events if isinstance(e, Redispatched)] == [cloud.workers[first].address]
    call.cancel()
    async with asyncio.timeout(0.1):
        await cloud.workers[other].target.was_cancelled.wait()


async def test_without_workers_it_is_503_with_retry_after_and_they_are_taken_back(cloud: Cloud) -> None:
    for name in ("w1", "w2"):
        await cloud.end(name)
    with pytest.raises(Unavailable) as caught:
        await cloud.infer()
    assert caught.value.retry_after_s >= 1
    await cloud.until(healthy=0)
    url = cloud.gateway.endpoint()["http"]
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}]}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v2/models/double/infer", json=body) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        async with session.get(f"{url}/v2/health/ready") as reply:
            assert reply.status == 503
        async with session.get(f"{url}/v2/health/live") as reply:
            assert reply.status == 200
    await cloud.start("w2")
    await cloud.until(healthy=1)
    assert (await cloud.infer()).stamp.by == "w2"
    assert [e.is_healthy for e in cloud.events if isinstance(e, HealthChanged)] == [True, True, False, False, True]


async def test_a_pinned_version_goes_to_the_worker_that_has_it(cloud: Cloud) -> None:
    await cloud.end("w2")
    await cloud.until(healthy=1)
    await cloud.start("w2", version="4")
    await cloud.until(healthy=2)
    answers = [await cloud.infer(pin="4") for _ in range(10)] + [await cloud.infer(pin="3") for _ in range(10)]
    assert [(a.stamp.by, a.stamp.version) for a in answers] == [("w2", "4")] * 10 + [("w1", "3")] * 10
    with pytest.raises(NotFound, match="versions served: 3, 4"):
        await cloud.infer(pin="5")
    assert (await cloud.client.model_metadata("double")).versions == ("3", "4")
    assert (await cloud.client.model_metadata("double", "4")).versions == ("4",)


async def test_a_worker_that_moved_on_since_the_last_probe_hands_over(cloud: Cloud) -> None:
    cloud.workers["w1"].target.version = "9"
    answers = [await cloud.infer(pin="3") for _ in range(20)]
    assert {a.stamp.by for a in answers} == {"w2"}


async def test_unknown_model_is_not_found_and_device_only_is_refused(cloud: Cloud) -> None:
    with pytest.raises(NotFound, match="known models: asleep, double, echo"):
        await cloud.infer("nothing")
    with pytest.raises(Unavailable, match="asleep"):
        await cloud.infer("asleep")
    with pytest.raises(InvalidRequest, match="device_only"):
        await cloud.infer(privacy=Privacy.DEVICE_ONLY)
    assert [w.calls for w in cloud.workers.values()] == [0, 0]


async def test_what_a_worker_says_is_passed_on(cloud: Cloud) -> None:
    with pytest.raises(Unavailable) as caught:
        await cloud.infer("full")
    assert caught.value.retry_after_s == 1.2
    assert sum(w.calls for w in cloud.workers.values()) == 1


async def test_load_and_unload_reach_all_workers(cloud: Cloud) -> None:
    await cloud.client.unload("double")
    assert {w.catalog.states["double"] for w in cloud.workers.values()} == {ModelState.UNAVAILABLE}
    assert not await cloud.client.model_ready("double")
    with pytest.raises(Unavailable):
        await cloud.infer()
    await cloud.client.load("double")
    assert await cloud.client.model_ready("double", "3")
    assert (await cloud.infer()).stamp.version == "3"
    with pytest.raises(NotFound):
        await cloud.client.load("nothing")
    del cloud.workers["w1"].catalog.states["echo"]
    await cloud.client.unload("echo")
    assert cloud.workers["w2"].catalog.states["echo"] is ModelState.UNAVAILABLE


async def test_stock_clients_get_right_answers_from_the_gateway(cloud: Cloud) -> None:
    endpoint = cloud.gateway.endpoint()

    def look(module: Any, address: str) -> None:
        client = module.InferenceServerClient(address)
        try:
            assert client.is_server_ready()
            assert client.is_model_ready("double")
            one = module.InferInput("x", [2, 2], "FP32")
            one.set_data_from_numpy(X)
            np.testing.assert_array_equal(client.infer("double", [one]).as_numpy("y"), X * 2)
            with pytest.raises(Exception, match="not known here"):
                client.infer("nothing", [one])
        finally:
            client.close()

    await asyncio.to_thread(look, triton_http, str(endpoint["http"]).removeprefix("http://"))
    await asyncio.to_thread(look, triton_grpc, str(endpoint["grpc"]))


async def test_metrics_tell_calls_and_health(cloud: Cloud) -> None:
    await cloud.infer()
    text = cloud.gateway.metrics.render().decode()
    assert 'outrider_requests_total{model="double",reason="",status="ok",target="cloud"} 1.0' in text
    for worker in cloud.workers.values():
        assert f'outrider_pool_member_healthy{{member="{worker.address}"}} 1.0' in text


async def test_leaving_waits_for_calls_in_progress() -> None:
    async with fake_worker("w1") as worker, AsyncExitStack() as clients:
        async with Gateway(GatewayConfig(workers=(worker.address,), server=LISTEN, drain_s=2.0)) as gateway:
            client = await clients.enter_async_context(OipClient(str(gateway.endpoint()["grpc"])))
            call = asyncio.create_task(client.infer(request("slow", deadline=time.monotonic() + 0.5)))
            await worker.target.started.wait()
        with pytest.raises(DeadlineExceeded):
            await call


@pytest.mark.parametrize("changes", [{"workers": ()}, {"workers": ("a", "a")}, {"probe_every_s": 0}, {"drain_s": -1}])
def test_bad_configuration_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        GatewayConfig(**{"workers": ("a",)} | changes)
