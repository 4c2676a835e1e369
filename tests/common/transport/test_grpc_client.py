"""Our gRPC client against our server, a dead port and a port that accepts and says nothing."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    NotFound,
    TargetUnreachable,
    Unavailable,
)
from common.request import Context, Priority, Privacy, Reason, Request
from common.serving.catalog import ModelState
from common.transport.grpc_client import OipClient
from common.transport.grpc_server import serve_grpc
from tests.common.transport.conftest import Served
from tests.common.transport.fakes import SPECS, FakeTarget, plane

X = np.arange(6, dtype=np.float32).reshape(3, 2)


def request(model: str, **context: Any) -> Request:
    return Request(model=model, inputs={"x": X}, context=Context(**context))


def after(seconds: float) -> float:
    return time.monotonic() + seconds


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def test_context_and_answer_cross_the_hop(served: Served) -> None:
    context = Context(
        id="id-1",
        priority=Priority.REALTIME,
        deadline=after(5),
        privacy=Privacy.DEVICE_ONLY,
        pin="3",
        traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        reason=Reason.NO_ENGINE,
    )
    async with OipClient(served.grpc) as client:
        answer = await client.infer(
            Request(model="double", inputs={"x": X}, outputs=("y",), context=context, parameters={"a": 1, "b": True})
        )
    np.testing.assert_array_equal(answer.outputs["y"], X * 2)
    stamp = answer.stamp
    assert (stamp.target, stamp.model, stamp.version, stamp.by) == ("edge", "double", "3", "node-a")
    assert stamp.reason is Reason.NO_ENGINE
    got = served.target.requests[0]
    assert got.context.deadline == pytest.approx(context.deadline, abs=0.05)
    for field in ("id", "priority", "privacy", "pin", "traceparent", "reason"):
        assert getattr(got.context, field) == getattr(context, field)
    assert (got.outputs, dict(got.parameters)) == (("y",), {"a": 1, "b": True})


@pytest.mark.parametrize("outputs", [(), ("probabilities",)])
async def test_classes_cross_the_hop(served: Served, outputs: tuple[str, ...]) -> None:
    async with OipClient(served.grpc_uds) as client:
        await client.infer(Request(model="photos", inputs={"x": X}, classes=4, outputs=outputs))
    assert (served.target.requests[0].classes, served.target.requests[0].outputs) == (4, outputs)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("nothing", NotFound),
        ("narrow", InvalidRequest),
        ("down", Unavailable),
        ("sick", EngineError),
        ("buggy", EngineError),
    ],
)
async def test_errors_come_back_as_ours(served: Served, model: str, kind: type[Exception]) -> None:
    async with OipClient(served.grpc) as client:
        with pytest.raises(kind) as caught:
            await client.infer(request(model))
    assert not isinstance(caught.value, TargetUnreachable)


async def test_retry_hint_of_the_peer_is_kept(served: Served) -> None:
    async with OipClient(served.grpc) as client:
        with pytest.raises(Unavailable) as caught:
            await client.infer(request("full"))
    assert caught.value.retry_after_s == 1.2


async def test_deadline_is_kept_on_this_side(served: Served) -> None:
    async with OipClient(served.grpc) as client:
        with pytest.raises(DeadlineExceeded):
            await client.infer(request("slow", deadline=after(0.05)))
        with pytest.raises(DeadlineExceeded, match="before it was sent"):
            await client.infer(request("echo", deadline=after(-1)))


async def test_a_deadline_beyond_a_lifetime_is_none(served: Served) -> None:
    async with OipClient(served.grpc) as client:
        answer = await client.infer(request("echo", deadline=after(1e13)))
    np.testing.assert_array_equal(answer.outputs["x"], X)
    assert served.target.requests[0].context.deadline == math.inf


async def test_models_of_the_peer(served: Served) -> None:
    async with OipClient(served.grpc) as client:
        assert await client.server_ready()
        assert (await client.model_metadata("double")).inputs == SPECS
        await client.unload("double")
        assert not await client.model_ready("double")
        await client.load("double")
        assert await client.model_ready("double", "3")
        assert {m.name: m.state for m in await client.index()} == {
            "double": ModelState.READY,
            "echo": ModelState.READY,
            "asleep": ModelState.UNAVAILABLE,
        }
        with pytest.raises(NotFound):
            await client.model_metadata("nothing")


async def test_dead_port_is_unreachable_at_once() -> None:
    async with OipClient(f"127.0.0.1:{free_port()}") as client:
        start = time.monotonic()
        for _ in range(3):
            with pytest.raises(TargetUnreachable):
                await client.infer(request("echo"))
    assert time.monotonic() - start < 1.0


async def test_silent_port_is_unreachable_within_the_bound() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        async with OipClient(f"127.0.0.1:{sock.getsockname()[1]}", connect_s=0.2) as client:
            start = time.monotonic()
            with pytest.raises(TargetUnreachable):
                await client.infer(request("echo"))
            with pytest.raises(DeadlineExceeded):
                await client.infer(request("echo", deadline=after(0.05)))
            assert time.monotonic() - start < 0.6


async def test_returned_peer_is_found_within_two_seconds(tmp_path: Path) -> None:
    dataplane = plane(FakeTarget())
    port = free_port()
    async with OipClient(f"127.0.0.1:{port}") as client:
        for _ in range(2):
            async with serve_grpc(dataplane, port=port, drain_s=0.0):
                async with asyncio.timeout(2.0):
                    while True:
                        try:
                            await client.infer(request("echo"))
                            break
                        except TargetUnreachable:
                            await asyncio.sleep(0.02)
            with pytest.raises(TargetUnreachable):
                await client.infer(request("echo"))


async def test_connection_that_breaks_without_an_answer_is_unreachable() -> None:
    target, port = FakeTarget(), free_port()
    async with OipClient(f"127.0.0.1:{port}") as client:
        async with serve_grpc(plane(target), port=port, drain_s=0.0):
            call = asyncio.create_task(client.infer(request("slow")))
            await target.started.wait()
        with pytest.raises(TargetUnreachable):
            await call
