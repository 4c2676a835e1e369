"""The node, the gateway and the client on a network that lets them down: silent, slow, broken and half-closed links."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from cloud.config import GatewayConfig
from cloud.events import Redispatched
from cloud.gateway import Gateway
from common.errors import DeadlineExceeded, OutriderError, TargetUnreachable, Unavailable
from common.request import Reason, Request
from common.telemetry.events import RequestDone
from common.transport.grpc_client import OipClient
from common.transport.servers import ServerOptions
from edge import AsyncClient, Node
from tests.cases.live import MODEL, held_cloud, held_node, node_config, until
from tests.cloud.fakes import fake_worker
from tests.proxy import proxy

X = np.array([[1.0, 2.0]], np.float32)


async def answers_again(node: Node) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                assert (await node.infer(MODEL, {"x": X}, timeout_s=2.0)).stamp.target == "cloud"
                return
            except (Unavailable, DeadlineExceeded):
                await asyncio.sleep(0.02)


# --- node and cloud ---


async def test_a_cloud_that_never_answers_the_connection_costs_the_edge_nothing(tmp_path: Path) -> None:
    """It takes connections, and nothing of the handshake comes back."""
    async with (
        held_cloud() as cloud,
        proxy(cloud.address) as link,
        held_node(tmp_path, gateway=link.address) as (node, _),
    ):
        link.blackhole = True
        lost = asyncio.create_task(node.infer(MODEL, {"x": np.ones((9, 2), np.float32)}))
        for _ in range(20):
            assert (await node.infer(MODEL, {"x": X}, timeout_s=0.5)).stamp.target == "edge"
        with pytest.raises(TargetUnreachable):  # no deadline of its own, and it does not hang
            await asyncio.wait_for(lost, 5.0)


async def test_after_five_failures_no_call_reaches_a_silent_cloud_until_its_probe(tmp_path: Path) -> None:
    at_worker: list[object] = []

    def reached() -> int:
        return sum(isinstance(event, RequestDone) for event in at_worker)

    async with (
        held_cloud(on_event=at_worker.append) as cloud,
        proxy(cloud.address) as link,
        Node(node_config(tmp_path, gateway=link.address)) as node,
    ):
        answer = await node.infer(MODEL, {"x": X})
        assert (answer.stamp.target, answer.stamp.reason) == ("cloud", Reason.NO_ENGINE)
        link.mute = True  # calls arrive, answers are lost
        fair = (node.infer(MODEL, {"x": X}, timeout_s=0.55) for _ in range(5))
        ends = await asyncio.gather(*fair, return_exceptions=True)
        assert all(isinstance(end, DeadlineExceeded) for end in ends)
        start, before = time.monotonic(), reached()
        assert before == 6
        while time.monotonic() < start + 0.2:  # of a cooldown of 0.5 s
            with pytest.raises(Unavailable, match="left alone") as caught:
                await node.infer(MODEL, {"x": X}, timeout_s=5.0)
            assert 0 < caught.value.retry_after_s <= 0.5
            await asyncio.sleep(0.005)
        assert reached() == before
        await asyncio.sleep(0.4)
        probes = (node.infer(MODEL, {"x": X}, timeout_s=0.55) for _ in range(20))
        ends = await asyncio.gather(*probes, return_exceptions=True)
        assert [type(end) for end in ends].count(DeadlineExceeded) == 1
        assert reached() == before + 1  # one probe; the other nineteen were told to come back
        link.mute = False
        link.reset()
        await answers_again(node)


async def test_a_slow_link_is_slow_and_right(tmp_path: Path) -> None:
    async with held_cloud() as cloud, proxy(cloud.address) as link:
        link.delay_s = 0.06
        async with Node(node_config(tmp_path, gateway=link.address)) as node:
            await node.infer(MODEL, {"x": X})
            start = time.monotonic()
            answer = await node.infer(MODEL, {"x": X})
            assert time.monotonic() - start >= 0.12  # there and back
            np.testing.assert_array_equal(answer.outputs["half"], X / 2)


async def test_a_throttled_link_keeps_deadlines_and_other_calls_apart(tmp_path: Path) -> None:
    """A link of 300 bytes a second takes seconds for one call: it ends at its deadline, the edge's own go on."""
    async with (
        held_cloud() as cloud,
        proxy(cloud.address) as link,
        held_node(tmp_path, gateway=link.address) as (node, _),
    ):
        with pytest.raises(OutriderError, match="at most 8"):  # the connection stands
            await node.infer(MODEL, {"x": np.ones((9, 2), np.float32)})
        link.bytes_per_s = 300.0
        start = time.monotonic()
        lost = asyncio.create_task(node.infer(MODEL, {"x": np.ones((90, 2), np.float32)}, timeout_s=0.4))
        for _ in range(20):
            assert (await node.infer(MODEL, {"x": X}, timeout_s=0.5)).stamp.target == "edge"
        assert not lost.done()
        with pytest.raises(DeadlineExceeded):
            await lost
        assert time.monotonic() - start >= 0.39


@pytest.mark.parametrize("fault", ["reset before the answer", "reset in the answer", "half-closed by the server"])
async def test_a_connection_that_breaks_fails_its_calls_at_once_and_is_made_anew(tmp_path: Path, fault: str) -> None:
    async with (
        held_cloud() as cloud,
        proxy(cloud.address) as link,
        Node(node_config(tmp_path, gateway=link.address)) as node,
    ):
        await node.infer(MODEL, {"x": X})
        cloud.engine.hold()
        under_way = asyncio.create_task(node.infer(MODEL, {"x": X}))
        await until(lambda: len(cloud.engine.batches) == 2)
        if fault == "reset before the answer":
            link.reset()
        elif fault == "reset in the answer":
            link.cut_after = 0
            cloud.engine.let_go()
        else:
            link.half_close()
        with pytest.raises(TargetUnreachable):
            await asyncio.wait_for(under_way, 2.0)
        link.cut_after = None
        cloud.engine.let_go()
        await answers_again(node)
        assert link.connections >= 2


async def test_a_call_that_broke_on_the_way_to_the_cloud_is_answered_at_home(tmp_path: Path) -> None:
    """The edge thinks itself too slow, the cloud's answer is cut in the middle: the edge still has it."""
    async with (
        held_cloud() as cloud,
        proxy(cloud.address) as link,
        held_node(tmp_path, gateway=link.address, base_s=0.6) as (node, _),
    ):
        assert (await node.infer(MODEL, {"x": X})).stamp.reason is Reason.DEADLINE
        link.cut_after = 0
        answer = await node.infer(MODEL, {"x": X})
        assert (answer.stamp.target, answer.stamp.reason) == ("edge", None)


# --- gateway and workers ---


async def test_the_gateway_tries_another_worker_and_remembers_which_one_broke() -> None:
    """One of two workers resets each connection in the middle of an answer. It has nothing in flight, always."""
    async with fake_worker("w1") as bad, fake_worker("w2") as good, proxy(bad.address) as link:
        config = GatewayConfig(
            workers=(link.address, good.address), server=ServerOptions(grpc_port=0), probe_every_s=30.0
        )
        moved: list[object] = []
        async with (
            Gateway(config, on_event=moved.append) as gateway,
            OipClient(str(gateway.endpoint()["grpc"])) as client,
        ):
            link.cut_after = 0
            calls = (client.infer(Request(model="double", inputs={"x": X})) for _ in range(8))
            first = await asyncio.gather(*calls)
            assert {answer.stamp.by for answer in first} == {"w2"}
            assert 1 <= bad.calls <= 8  # it was picked, at once and by several
            again = sum(isinstance(event, Redispatched) for event in moved)
            assert again >= bad.calls
            for _ in range(20):
                assert (await client.infer(Request(model="double", inputs={"x": X}))).stamp.by == "w2"
            assert sum(isinstance(event, Redispatched) for event in moved) == again  # left alone, though it looks idle


# --- the Python client ---


async def test_the_client_goes_elsewhere_for_a_broken_connection_and_not_for_a_503(tmp_path: Path) -> None:
    asked: list[list[object]] = [[], []]

    def done(number: int) -> int:
        return sum(isinstance(event, RequestDone) for event in asked[number])

    async with (
        held_node(tmp_path / "a", on_event=asked[0].append, max_queue_rows=1) as (first, engine),
        held_node(tmp_path / "b", on_event=asked[1].append) as (second, _),
        proxy(first.endpoint()["grpc"]) as link,
        AsyncClient([link.address, second.endpoint()["grpc"]]) as client,
    ):
        assert (await client.infer(MODEL, {"x": X})).by == "node"
        engine.hold()
        waiting = [asyncio.create_task(first.infer(MODEL, {"x": X})) for _ in range(2)]
        await until(lambda: len(engine.batches) == 2)
        await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="overloaded"):
            await client.infer(MODEL, {"x": X})
        assert done(1) == 0  # a 503 is the answer; whether to try again is not the client's to say
        engine.let_go()
        await asyncio.gather(*waiting)
        engine.hold()
        before = done(0)
        call = asyncio.create_task(client.infer(MODEL, {"x": X}))
        await until(lambda: len(engine.batches) >= 4)
        link.cut_after = 0
        engine.let_go()
        await call
        assert (done(0), done(1)) == (before + 1, 1)  # answered, but the answer was lost: asked once more, elsewhere
