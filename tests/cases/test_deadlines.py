"""Cases of deadlines that users of other serving systems reported: each test names the case and its fault."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest

from common.errors import DeadlineExceeded, InvalidRequest, TargetUnreachable, Unavailable
from common.request import Priority, Reason, Request
from common.telemetry.events import RequestDone
from common.transport import oip_grpc
from common.transport.grpc_client import OipClient
from common.transport.proto import oip_pb2 as pb
from common.transport.servers import ServerOptions
from edge import Node
from tests.cases.live import INFER, MODEL, body, held_cloud, held_node, node_config, queued, until
from tests.proxy import proxy

X = np.array([[1.0, 2.0]], np.float32)


@pytest.mark.parametrize("transport", ["http", "grpc"])
async def test_case_2_what_is_past_its_deadline_is_never_run_and_hears_so_at_its_deadline(
    tmp_path: Path, transport: str
) -> None:
    """Serving 2: requests whose deadline has passed are run all the same, and told when the long job ends."""
    async with held_node(tmp_path) as (node, engine):
        engine.hold()
        job = asyncio.create_task(node.infer(MODEL, {"x": X * 7}))
        await until(lambda: engine.batches == [1])
        waits: list[float] = []

        async def over_http(session: aiohttp.ClientSession) -> None:
            start = time.monotonic()
            async with session.post(INFER, json=body(), headers={"x-outrider-deadline-ms": "50"}) as reply:
                assert reply.status == 503
                assert "deadline" in (await reply.json())["error"]
            waits.append(time.monotonic() - start)

        async def over_grpc(client: OipClient) -> None:
            start = time.monotonic()
            with pytest.raises(DeadlineExceeded):  # the server's word: this client has no clock of its own running
                await client.infer(Request(model=MODEL, inputs={"x": X}, parameters={"timeout": 50_000}))
            waits.append(time.monotonic() - start)

        async with (
            aiohttp.ClientSession(node.endpoint()["http"]) as session,
            OipClient(node.endpoint()["grpc"]) as client,
            asyncio.timeout(5),
        ):
            calls = (over_http(session) if transport == "http" else over_grpc(client) for _ in range(50))
            await asyncio.gather(*calls)
        assert engine.gate is not None
        assert not engine.gate.is_set()  # the long job is still under way: nobody waited for it
        assert min(waits) >= 0.045
        assert queued(node) == 0
        engine.let_go()
        await job
        assert engine.seen == [[7.0, 14.0]]


@pytest.mark.parametrize(
    ("header_ms", "parameter_us", "grpc_s"),
    [
        (60, None, None),
        (None, 60_000, None),
        (None, None, 0.06),
        (60, 30_000_000, 30.0),
        (30_000, 60_000, 30.0),
        (30_000, 30_000_000, 0.06),
        (60, 2**63 - 1, None),  # the longest that can be said: as good as none
    ],
)
async def test_case_3_the_smallest_of_the_timeouts_that_are_set_counts(
    tmp_path: Path, header_ms: int | None, parameter_us: int | None, grpc_s: float | None
) -> None:
    """Serving 3: the client's timeout counts only below a server default, and not at all without one."""
    ended: list[RequestDone] = []
    async with held_node(tmp_path, on_event=lambda e: ended.append(e) if isinstance(e, RequestDone) else None) as (
        node,
        engine,
    ):
        engine.hold()
        job = asyncio.create_task(node.infer(MODEL, {"x": X}))
        await until(lambda: engine.batches == [1])
        await _call(node.endpoint()["grpc"], header_ms, parameter_us, grpc_s)
        if grpc_s is None:
            await _post(node.endpoint()["http"], header_ms, parameter_us)
        await until(lambda: len(ended) == (1 if grpc_s else 2))
        for one in ended:
            assert one.error in {"DeadlineExceeded", "CancelledError"}  # gRPC's own deadline ends the handler
            assert 0.03 < one.seconds < 5.0
        engine.let_go()
        await job


@pytest.mark.parametrize(("default_s", "header_ms"), [(0.06, None), (0.06, 30_000), (30.0, 60)])
async def test_case_3_the_servers_own_limit_counts_where_it_is_the_smaller(
    tmp_path: Path, default_s: float, header_ms: int | None
) -> None:
    """Serving 3: of the server's default and the client's timeout, the smaller; over HTTP, gRPC and in process."""
    limited = ServerOptions(http_port=0, grpc_port=0, timeout_s=default_s)
    async with held_node(tmp_path, server=limited) as (node, engine), asyncio.timeout(5):
        engine.hold()
        await _post(node.endpoint()["http"], header_ms, None)
        await _call(node.endpoint()["grpc"], header_ms, None, None)
        with pytest.raises(DeadlineExceeded):
            await node.infer(MODEL, {"x": X}, timeout_s=header_ms / 1000 if header_ms else math.inf)


async def _call(address: str, header_ms: int | None, parameter_us: int | None, grpc_s: float | None) -> None:
    message = oip_grpc.write_request(Request(model=MODEL, inputs={"x": X}))
    if parameter_us is not None:
        message.parameters["timeout"].int64_param = parameter_us
    async with grpc.aio.insecure_channel(address) as channel:
        method = channel.unary_unary(
            f"/{oip_grpc.SERVICE}/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        metadata = [("x-outrider-deadline-ms", str(header_ms))] if header_ms is not None else []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(message, timeout=grpc_s, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def _post(address: str, header_ms: int | None, parameter_us: int | None) -> None:
    headers = {"x-outrider-deadline-ms": str(header_ms)} if header_ms is not None else {}
    more: dict[str, Any] = {"parameters": {"timeout": parameter_us}} if parameter_us is not None else {}
    async with (
        aiohttp.ClientSession(address) as session,
        session.post(INFER, json=body(**more), headers=headers) as reply,
    ):
        assert reply.status == 503


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1e3", "", " ", "50, 60", "0x10"])
async def test_case_3_a_deadline_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    """Serving 3: what cannot be honoured is said, not left out. Two values are none."""
    fields = [("x-outrider-deadline-ms", one) for one in value.split(", ")]
    async with held_node(tmp_path) as (node, engine), aiohttp.ClientSession(node.endpoint()["http"]) as session:
        async with session.post(INFER, json=body(), headers=fields) as reply:
            assert reply.status == 400
            assert "x-outrider-deadline-ms" in (await reply.json())["error"]
        assert engine.seen == []
        async with session.post(INFER, json=body(), headers={"x-outrider-deadline-ms": "0"}) as reply:
            assert reply.status == 503  # no time left is a deadline, too


async def test_case_14_a_tiny_timeout_says_nothing_about_a_healthy_cloud(tmp_path: Path) -> None:
    """Serving 14: a caller's 1 ms makes the target look dead for everybody. First: the breaker does open."""
    async with (
        held_cloud() as cloud,
        proxy(cloud.address) as link,
        Node(node_config(tmp_path, gateway=link.address)) as node,
    ):

        async def at_once(times: int, timeout_s: float) -> list[object]:
            calls = (node.infer(MODEL, {"x": X}, timeout_s=timeout_s) for _ in range(times))
            return list(await asyncio.gather(*calls, return_exceptions=True))

        assert (await node.infer(MODEL, {"x": X})).stamp.target == "cloud"
        link.mute = True
        assert all(isinstance(end, DeadlineExceeded) for end in await at_once(5, 0.6))
        with pytest.raises(Unavailable, match="left alone"):
            await node.infer(MODEL, {"x": X}, timeout_s=5.0)
        link.mute = False
        link.reset()
        await _until_it_answers(node)
        for timeout_s in (0.001, 0.0, -1.0):
            ends = await at_once(100, timeout_s)
            assert not [end for end in ends if isinstance(end, Unavailable)]
            assert any(isinstance(end, DeadlineExceeded) for end in ends)
        assert (await node.infer(MODEL, {"x": X}, timeout_s=5.0)).stamp.target == "cloud"
        assert [one.cool_until for one in cloud.gateway.members.pool.members] == [-math.inf]


async def _until_it_answers(node: Node) -> None:
    """Until a probe has closed the breaker."""
    async with asyncio.timeout(10):
        while True:
            try:
                await node.infer(MODEL, {"x": X}, timeout_s=2.0)
                return
            except (Unavailable, DeadlineExceeded):
                await asyncio.sleep(0.02)


async def test_case_25_a_cloud_that_swallows_everything_never_holds_up_the_edge(tmp_path: Path) -> None:
    """Serving 25: calls to the edge block while the cloud takes every packet and answers none."""
    async with held_cloud() as cloud, proxy(cloud.address) as link, held_node(tmp_path, gateway=link.address) as at:
        node, engine = at
        too_many = {"x": np.ones((9, 2), np.float32)}
        with pytest.raises(InvalidRequest):  # the cloud's word: its connection stands
            await node.infer(MODEL, too_many)
        link.blackhole = True
        lost = [asyncio.create_task(node.infer(MODEL, too_many, timeout_s=1.0)) for _ in range(20)]
        await asyncio.sleep(0.05)
        answers = await asyncio.gather(*(node.infer(MODEL, {"x": X}, timeout_s=0.5) for _ in range(50)))
        assert {answer.stamp.target for answer in answers} == {"edge"}
        assert not any(call.done() for call in lost)  # the edge did not wait for what the cloud owes
        ends = await asyncio.gather(*lost, return_exceptions=True)
        assert all(isinstance(end, DeadlineExceeded | TargetUnreachable) for end in ends)
        assert len(engine.seen) == 50


async def test_case_25_a_slow_edge_still_answers_in_time_after_a_silent_cloud(tmp_path: Path) -> None:
    """Serving 25: the edge thinks itself too slow for the class, the cloud it asks first never answers."""
    async with (
        held_cloud() as cloud,
        proxy(cloud.address) as link,
        held_node(tmp_path, gateway=link.address, base_s=0.25) as at,
    ):
        node, _ = at
        urgent = Priority.REALTIME  # 200 ms
        assert (await node.infer(MODEL, {"x": X}, priority=urgent)).stamp.reason is Reason.DEADLINE
        link.mute = True
        answer = await node.infer(MODEL, {"x": X}, priority=urgent, timeout_s=1.0)
        assert (answer.stamp.target, answer.stamp.reason) == ("edge", None)
