"""Cases of limits that users of other serving systems reported: pauses, cooldowns, callers that leave, full queues."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import numpy as np
import pytest

from cloud.config import GatewayConfig
from cloud.gateway import Gateway
from common.errors import TargetUnreachable, Unavailable
from common.request import Priority, Reason, Request, Response
from common.serving.breaker import TargetBreakers
from common.serving.policy import Only
from common.serving.router import Router
from common.serving.target import Estimate, Readiness
from common.transport import oip_grpc
from common.transport.grpc_client import OipClient
from common.transport.servers import ServerOptions
from edge import Node
from tests.cases.live import INFER, MODEL, Cloud, body, held_cloud, held_node, node_config, queued, until
from tests.cloud.fakes import fake_worker
from tests.fakes import FakeClock

X = np.array([[1.0, 2.0]], np.float32)


# --- 12, 13: pauses and cooldowns ---


async def test_case_12_an_upstream_that_says_when_to_come_back_gets_no_call_before(tmp_path: Path) -> None:
    """Serving 12: Retry-After is not sent, or is ignored and the burst goes on. Node, gateway and worker in a row."""
    async with fake_worker("w1") as worker:  # its model `full` has no room for 1.2 s
        config = GatewayConfig(workers=(worker.address,), server=ServerOptions(grpc_port=0))
        async with Gateway(config) as gateway:
            node_on_it = node_config(tmp_path, gateway=gateway.endpoint()["grpc"])
            async with Node(node_on_it) as node, aiohttp.ClientSession(node.endpoint()["http"]) as session:
                start = time.monotonic()
                for _ in range(10):
                    async with session.post("/v2/models/full/infer", json=body()) as reply:
                        assert reply.status == 503
                        assert 1 <= int(reply.headers["Retry-After"]) <= 2
                async with OipClient(gateway.endpoint()["grpc"]) as client:  # the gateway keeps it for other callers
                    for _ in range(10):
                        with pytest.raises(Unavailable) as caught:
                            await client.infer(Request(model="full", inputs={"x": X}))
                        assert 0 < caught.value.retry_after_s <= 1.2
                        assert not isinstance(caught.value, TargetUnreachable)
                assert time.monotonic() - start < 1.2
                assert worker.calls == 1
                urgent = time.monotonic()
                with pytest.raises(Unavailable):  # a more urgent class goes before what fills the queue
                    await node.infer("full", {"x": X}, priority=Priority.REALTIME)
                await node.infer("double", {"x": X})  # and another model has nothing to do with it
                assert worker.calls == 3
                await asyncio.sleep(urgent + 1.3 - time.monotonic())
                with pytest.raises(Unavailable):
                    await node.infer("full", {"x": X})
                assert worker.calls == 4


async def test_case_13_the_longer_cooldown_stands_at_once() -> None:
    """Serving 13: a shorter cooldown overwrites a longer one, and cooled targets get calls for seconds."""

    class Upstream:
        name, asked = "cloud", 0

        async def infer(self, request: Request) -> Response:
            self.asked += 1
            raise TargetUnreachable("cloud", "reset")

        def readiness(self, model: str, version: str | None = None) -> Readiness:
            return Readiness.READY

        def estimate(self, request: Request) -> Estimate:
            return Estimate()

    clock, upstream, breakers = FakeClock(), Upstream(), TargetBreakers()
    router = Router([upstream], Only("cloud"), breakers=breakers, clock=clock)
    # calls that were under way together end: the upstream asks for 3 s, then for less, then it breaks
    ends = [Unavailable("full", retry_after_s=3.0), Unavailable("full", retry_after_s=0.2)]
    for end in (*ends, *[TargetUnreachable("cloud", "reset")] * 5):
        breakers.failed("cloud", "m", Priority.INTERACTIVE, end, 5.0, clock.monotonic())

    async def burst() -> None:
        calls = (router.infer(Request(model="m", inputs={"x": X})) for _ in range(10))
        assert all(isinstance(end, Unavailable) for end in await asyncio.gather(*calls, return_exceptions=True))

    for _ in range(29):
        await burst()
        clock.advance(0.1)
    assert upstream.asked == 0  # 2.9 s
    clock.advance(0.11)
    await burst()
    assert upstream.asked == 1  # one probe, whose failure counts at once


# --- 17: callers that leave ---


@contextlib.asynccontextmanager
async def chain(folder: Path) -> AsyncIterator[tuple[Node, Cloud]]:
    """A node without the model, a gateway, a worker whose engine is held by a first call."""
    async with held_cloud() as cloud, Node(node_config(folder, gateway=cloud.address)) as node:
        cloud.engine.hold()
        running = asyncio.create_task(node.infer(MODEL, {"x": X}))
        await until(lambda: cloud.engine.batches == [1])
        yield node, cloud
        cloud.engine.let_go()
        await running


def http_socket(address: str) -> socket.socket:
    if address.startswith("http+unix://"):
        one = socket.socket(socket.AF_UNIX)
        one.connect(address.removeprefix("http+unix://"))
        return one
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


@pytest.mark.parametrize("leaves", ["closes", "resets", "half-closes"])
@pytest.mark.parametrize("listener", [0, 1], ids=["tcp", "uds"])
async def test_case_17_an_http_caller_that_leaves_takes_its_call_out_of_every_queue(
    tmp_path: Path, leaves: str, listener: int
) -> None:
    """Serving 17: a client that disconnects cancels nothing. Here its call waits two processes further on."""
    async with chain(tmp_path) as (node, cloud):
        assert node.servers.http is not None
        content = json.dumps(body()).encode()
        head = f"POST {INFER} HTTP/1.1\r\nHost: node\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        waits = []
        for _ in range(3):
            with http_socket(node.servers.http.addresses[listener]) as caller:
                caller.sendall(head + content)
                await until(lambda: queued(cloud.worker) == 1)
                if leaves == "half-closes":
                    caller.shutdown(socket.SHUT_WR)
                elif leaves == "resets":
                    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                if leaves != "half-closes":
                    caller.close()
                waits.append(await until(lambda: queued(cloud.worker) == 0))
            await until(lambda: cloud.gateway.dataplane.in_flight == node.dataplane.in_flight == 1)
        assert min(waits) < 0.1
        assert cloud.engine.seen == [[1.0, 2.0]]
    assert cloud.engine.batches == [1]  # none of them was run later


@pytest.mark.parametrize("listener", [0, 1], ids=["tcp", "uds"])
async def test_case_17_a_grpc_caller_that_leaves_takes_its_call_out_of_every_queue(
    tmp_path: Path, listener: int
) -> None:
    """Serving 17: the same over gRPC: a cancelled call, and a connection that goes away with the call on it."""
    async with chain(tmp_path) as (node, cloud):
        assert node.servers.grpc is not None
        address = node.servers.grpc.addresses[listener]
        waits = []
        for is_cancelled in (True, True, False):
            async with OipClient(address) as client:
                call = asyncio.create_task(client.infer(Request(model=MODEL, inputs={"x": X})))
                await until(lambda: queued(cloud.worker) == 1)
                if is_cancelled:
                    call.cancel()
                else:
                    await client.close()
                waits.append(await until(lambda: queued(cloud.worker) == 0))
                await asyncio.gather(call, return_exceptions=True)
        await until(lambda: cloud.gateway.dataplane.in_flight == node.dataplane.in_flight == 1)
        assert min(waits) < 0.1
    assert cloud.engine.batches == [1]


async def test_case_17_a_stream_that_is_cancelled_takes_its_call_out_of_every_queue(tmp_path: Path) -> None:
    """Serving 17: the same for a request in a stream of them."""
    async with chain(tmp_path) as (node, cloud), grpc.aio.insecure_channel(node.endpoint()["grpc"]) as channel:
        method = channel.stream_stream(
            f"/{oip_grpc.SERVICE}/ModelStreamInfer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=bytes,
        )
        waits = []
        for _ in range(3):
            stream = method()
            await stream.write(oip_grpc.write_request(Request(model=MODEL, inputs={"x": X})))
            await until(lambda: queued(cloud.worker) == 1)
            stream.cancel()
            waits.append(await until(lambda: queued(cloud.worker) == 0))
        assert min(waits) < 0.1
    assert cloud.engine.batches == [1]


async def test_case_17_a_caller_that_leaves_while_the_engine_runs_costs_its_neighbours_nothing(tmp_path: Path) -> None:
    """Serving 17: cancelled in the last stage: the batch goes on for the others, and the queue after it."""
    async with held_node(tmp_path) as (node, engine):
        engine.hold()
        first = asyncio.create_task(node.infer(MODEL, {"x": X}))
        await until(lambda: engine.batches == [1])
        batch = [asyncio.create_task(node.infer(MODEL, {"x": X * n})) for n in range(4)]
        await until(lambda: queued(node) == 4)
        first.cancel()  # it runs
        batch[1].cancel()  # it waits
        await until(lambda: queued(node) == 3)
        engine.let_go()
        answers = await asyncio.gather(batch[0], batch[2], batch[3])
        assert [float(answer.outputs["half"][0, 1]) for answer in answers] == [0.0, 2.0, 3.0]
        assert engine.seen == [[1.0, 2.0], [0.0, 0.0], [2.0, 4.0], [3.0, 6.0]]


# --- 21: a full queue ---


async def test_case_21_a_full_queue_is_503_with_retry_after_and_unavailable_over_grpc(tmp_path: Path) -> None:
    """Serving 21: a full queue answers 500."""
    async with (
        held_node(tmp_path, max_queue_rows=2) as (node, engine),
        aiohttp.ClientSession(node.endpoint()["http"]) as session,
        grpc.aio.insecure_channel(node.endpoint()["grpc"]) as channel,
    ):
        engine.hold()
        waiting = [asyncio.create_task(node.infer(MODEL, {"x": X})) for _ in range(3)]
        await until(lambda: engine.batches == [1] and queued(node) == 2)
        async with session.post(INFER, json=body()) as reply:
            assert reply.status == 503
            assert int(reply.headers["Retry-After"]) >= 1
            assert "overloaded" in (await reply.json())["error"]
        method = channel.unary_unary(f"/{oip_grpc.SERVICE}/ModelInfer")
        call = method(oip_grpc.write_request(Request(model=MODEL, inputs={"x": X})).SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        trailing = dict(caught.value.trailing_metadata() or ())
        assert int(str(trailing["retry-after"])) >= 1
        engine.let_go()
        assert len(await asyncio.gather(*waiting)) == 3
        async with session.post(INFER, json=body()) as reply:
            assert reply.status == 200


async def test_case_21_with_a_cloud_behind_a_full_queue_is_a_reason_to_leave(tmp_path: Path) -> None:
    """Serving 21: and the full queue of both is still 503 with Retry-After, never 500."""
    async with (
        held_cloud() as cloud,
        held_node(tmp_path, gateway=cloud.address, max_queue_rows=1) as (node, engine),
        aiohttp.ClientSession(node.endpoint()["http"]) as session,
    ):
        engine.hold()
        waiting = [asyncio.create_task(node.infer(MODEL, {"x": X})) for _ in range(2)]
        await until(lambda: engine.batches == [1] and queued(node) == 1)
        assert (await node.infer(MODEL, {"x": X})).stamp.reason is Reason.OVERLOAD
        cloud.worker.local.device.max_queue_rows = 0
        async with session.post(INFER, json=body()) as reply:
            assert reply.status == 503
            assert int(reply.headers["Retry-After"]) >= 1
        engine.let_go()
        await asyncio.gather(*waiting)
