"""The client against real nodes, in this process and in others, over TCP and Unix sockets."""

from __future__ import annotations

import asyncio
import inspect
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    InvalidRequest,
    NotFound,
    TargetUnreachable,
    Unavailable,
)
from common.request import Priority, Privacy, Reason
from common.serving.catalog import ModelState
from common.serving.engine import Batch, Outputs
from common.telemetry.events import RequestDone
from common.transport.servers import ServerOptions
from edge import AsyncClient, CacheOptions, Client, Node, NodeConfig, StaticModel
from edge.client.endpoints import MAX_COOL_S, Rotation, parse_endpoints
from tests.bundles import forward, write_bundle

X = np.array([[1.0, 2.0]], np.float32)
CHILD = """
import asyncio, sys
from edge import CacheOptions, Node, NodeConfig, ServerOptions, StaticModel

async def main(bundle, state):
    config = NodeConfig(name="child", state_dir=state, cache=CacheOptions(enabled=False),
        models=(StaticModel(bundle=bundle, version="1"),), server=ServerOptions(grpc_port=0))
    async with Node(config) as node:
        print(node.endpoint()["grpc"], flush=True)
        await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


@dataclass
class Running:
    """A node that serves `linear` version 1 over TCP and a Unix socket, and what it was asked."""

    node: Node
    tcp: str
    uds: str
    asked: list[RequestDone] = field(default_factory=list)

    def slow_down(self, seconds: float) -> None:
        """Each batch takes that long in the engine."""
        loaded = self.node.local.repository.current("linear")
        assert loaded is not None
        run = loaded.engine.run

        def slow(batch: Batch) -> list[Outputs | Exception]:
            time.sleep(seconds)
            return run(batch)

        loaded.engine.run = slow  # type: ignore[method-assign]


def node_of(folder: Path, bundle: Path, asked: list[RequestDone], *, name: str = "node") -> tuple[Node, str]:
    uds = str(folder / f"{name}.sock")
    config = NodeConfig(
        name=name,
        state_dir=str(folder / name),
        models=(StaticModel(bundle=str(bundle), version="1"),),
        cache=CacheOptions(enabled=False),
        server=ServerOptions(grpc_port=0, grpc_uds=uds),
        drain_s=2.0,
    )
    return Node(config, on_event=lambda e: asked.append(e) if isinstance(e, RequestDone) else None), f"unix:{uds}"


@asynccontextmanager
async def running(folder: Path, bundle: Path, *, name: str = "node") -> AsyncIterator[Running]:
    asked: list[RequestDone] = []
    node, uds = node_of(folder, bundle, asked, name=name)
    async with node:
        yield Running(node, node.endpoint()["grpc"], uds, asked)


@contextmanager
def child_node(folder: Path, bundle: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A node in a process of its own, and its address. Killed at the end."""
    command = [sys.executable, "-c", CHILD, str(bundle), str(folder / "child")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@contextmanager
def nobody() -> Iterator[str]:
    """An address where nobody listens, and nobody else will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("linear") / "bundle", max_batch=4)


# --- what a call carries and brings back ---


@pytest.mark.parametrize("transport", ["tcp", "uds"])
async def test_an_answer_has_the_values_and_the_stamp(tmp_path: Path, bundle: Path, transport: str) -> None:
    async with running(tmp_path, bundle) as at, AsyncClient(getattr(at, transport)) as client:
        answer = await client.infer("linear", {"x": X}, outputs=("logits",), timeout_s=5.0)
        np.testing.assert_allclose(answer.outputs["logits"], forward(X), rtol=1e-6)
        assert (answer.target, answer.reason, answer.model) == ("edge", None, "linear")
        assert (answer.version, answer.by) == ("1", "node")
        best = await client.infer("linear", {"x": X}, classes=1)
        assert b"right" in best.outputs["logits"].ravel()[0]  # logits 1, 2.5, 1: the second label


async def test_the_reason_is_a_word_of_the_domain(tmp_path: Path, bundle: Path) -> None:
    async with running(tmp_path, bundle, name="cloud") as behind:
        config = NodeConfig(
            name="front",
            state_dir=str(tmp_path / "front"),
            gateway=behind.tcp,
            cache=CacheOptions(enabled=False),
            server=ServerOptions(grpc_port=0),
        )
        async with Node(config) as front, AsyncClient(front.endpoint()["grpc"]) as client:
            answer = await client.infer("linear", {"x": X})
            assert (answer.target, answer.reason, answer.by) == ("cloud", Reason.NO_ENGINE, "cloud")


async def test_priority_and_pin_pass(tmp_path: Path, bundle: Path) -> None:
    async with running(tmp_path, bundle) as at, AsyncClient(at.tcp) as client:
        await client.infer("linear", {"x": X}, priority=Priority.BATCH, pin="1")
        await client.infer("linear", {"x": X}, parameters={"priority": 4})  # the argument goes before the parameter
        assert [done.priority for done in at.asked] == [Priority.BATCH, Priority.INTERACTIVE]
        with pytest.raises(NotFound, match="version"):
            await client.infer("linear", {"x": X}, pin="7")


async def test_the_deadline_ends_a_slow_call(tmp_path: Path, bundle: Path) -> None:
    async with running(tmp_path, bundle) as at, AsyncClient([at.tcp, at.uds]) as client:
        await client.infer("linear", {"x": X})
        at.slow_down(0.5)
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await client.infer("linear", {"x": X}, timeout_s=0.1)
        assert time.monotonic() - start < 0.4
        assert len(at.asked) <= 2  # not tried again at the other address
        with pytest.raises(DeadlineExceeded):
            await client.infer("linear", {"x": X}, timeout_s=0.0)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        ("timeout_s", {"timeout_s": math.nan}),
        ("timeout_s", {"timeout_s": "1"}),
        ("priority", {"priority": 9}),
        ("priority", {"priority": "batch"}),
        ("privacy", {"privacy": "none"}),
        ("pin", {"pin": 1}),
        ("pin", {"pin": "\ud800"}),
        ("model", {"model": 7}),
        ("model", {"model": "\ud800"}),
        ("inputs", {"inputs": [X]}),
        ("inputs", {"inputs": {1: X}}),
        ("inputs", {"inputs": {"\ud800": X}}),
        ("outputs", {"outputs": "logits"}),
        ("outputs", {"outputs": ["\ud800"]}),
        ("outputs", {"outputs": 3}),
        ("classes", {"classes": 2**70}),
        ("classes", {"classes": "3"}),
        ("parameters", {"parameters": {"a": 2**70}}),
        ("parameters", {"parameters": {"\ud800": 1}}),
        ("parameters", {"parameters": [("a", 1)]}),
    ],
)
async def test_a_wrong_argument_is_refused_by_its_name_before_a_connection_is_needed(
    names: str, options: dict[str, Any]
) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidInput) as refused:
            await client.infer(**{"model": "linear", "inputs": {"x": X}} | options)
    assert refused.value.where.startswith(names)


async def test_wrong_arguments_of_the_other_methods_are_refused_by_their_names() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        for call in (
            lambda **options: client.metadata("linear", **options),
            lambda **options: client.load("linear", **options),
            lambda **options: client.unload("linear", **options),
            client.index,
            client.ready,
        ):
            for timeout_s in (math.nan, "1", None, True):
                with pytest.raises(InvalidInput, match=r"^timeout_s: "):
                    await call(timeout_s=timeout_s)
        for method in (client.metadata, client.load, client.unload):
            for model in (7, "\ud800"):
                with pytest.raises(InvalidInput, match=r"^model: "):
                    await method(model)
            with pytest.raises(NotFound, match="at most 255 characters"):
                await method("m" * 256)
        with pytest.raises(InvalidInput, match=r"^version: "):
            await client.metadata("linear", 1)  # type: ignore[arg-type]
        with pytest.raises(NotFound, match="at most 255 characters"):
            await client.infer("m" * 256, {"x": X})


async def test_arguments_may_be_what_means_the_same(tmp_path: Path, bundle: Path) -> None:
    async with running(tmp_path, bundle) as at, AsyncClient(at.tcp) as client:
        answer = await client.infer(
            "linear", {"x": X}, outputs=["logits"], priority=3, privacy="device_only", timeout_s=10**400
        )
        assert list(answer.outputs) == ["logits"]
        assert [done.priority for done in at.asked] == [Priority.BATCH]
        with pytest.raises(DeadlineExceeded):
            await client.infer("linear", {"x": X}, timeout_s=-(10**400))


async def test_models_can_be_asked_about_loaded_and_unloaded(tmp_path: Path, bundle: Path) -> None:
    async with running(tmp_path, bundle) as at, AsyncClient(at.uds) as client:
        assert await client.ready()
        metadata = await client.metadata("linear")
        assert (metadata.versions, metadata.inputs[0].name) == (("1",), "x")
        await client.unload("linear")
        assert [status.state for status in await client.index()] == [ModelState.UNAVAILABLE]
        with pytest.raises(Unavailable) as caught:
            await client.infer("linear", {"x": X})
        assert caught.value.retry_after_s >= 1.0
        assert not isinstance(caught.value, TargetUnreachable)
        await client.load("linear")
        assert (await client.infer("linear", {"x": X})).version == "1"


# --- several endpoints ---


async def test_an_error_that_is_an_answer_is_not_tried_elsewhere(tmp_path: Path, bundle: Path) -> None:
    first, second = running(tmp_path, bundle, name="a"), running(tmp_path, bundle, name="b")
    async with first as a, second as b, AsyncClient([a.tcp, b.tcp]) as client:
        with pytest.raises(NotFound, match="known models: linear"):
            await client.infer("nope", {"x": X})
        with pytest.raises(InvalidRequest):
            await client.infer("linear", {"x": np.ones((1, 3), np.float32)})
        with pytest.raises(InvalidInput, match="complex"):
            await client.infer("linear", {"x": np.array([1 + 2j])})  # refused here, sent to nobody
        await client.unload("linear")
        with pytest.raises(Unavailable):
            await client.infer("linear", {"x": X})
        assert (len(a.asked), len(b.asked)) == (3, 0)


async def test_a_node_that_closes_under_load_costs_no_call(tmp_path: Path, bundle: Path) -> None:
    async with AsyncExitStack() as stack, running(tmp_path, bundle, name="b") as b:
        a = await stack.enter_async_context(running(tmp_path, bundle, name="a"))
        async with asyncio.timeout(20), AsyncClient([a.tcp, b.uds]) as client:
            load = asyncio.create_task(_load(client, until=lambda: len(b.asked) > 100))
            while len(a.asked) < 100:
                await asyncio.sleep(0.01)
            await stack.aclose()
            assert await load == {"a", "b"}
    assert all(not done.error for done in a.asked + b.asked)


async def test_a_node_that_is_killed_under_load_costs_no_call(tmp_path: Path, bundle: Path) -> None:
    with child_node(tmp_path, bundle) as (process, address):
        async with running(tmp_path, bundle, name="b") as b, AsyncClient([address, b.tcp]) as client:
            async with asyncio.timeout(20):
                load = asyncio.create_task(_load(client, until=lambda: len(b.asked) > 100))
                await asyncio.sleep(0.3)
                process.kill()
                assert await load == {"child", "b"}


async def _load(client: AsyncClient, *, until: Callable[[], bool]) -> set[str]:
    """Calls from eight tasks until it is enough; who answered. Raises what any call raised."""
    by: set[str] = set()

    async def caller() -> None:
        while not until():
            by.add((await client.infer("linear", {"x": X}, timeout_s=5.0)).by)

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(caller())
    return by


async def test_a_node_that_comes_back_is_used_again(tmp_path: Path, bundle: Path) -> None:
    models = (StaticModel(bundle=str(bundle), version="1"),)
    uds = str(tmp_path / "near.sock")

    def node(name: str, listen: ServerOptions) -> Node:
        return Node(NodeConfig(name=name, cache=CacheOptions(enabled=False), models=models, server=listen))

    async with (
        node("far", ServerOptions(grpc_port=0)) as far,
        AsyncClient([f"unix:{uds}", far.endpoint()["grpc"]]) as client,
    ):
        assert (await client.infer("linear", {"x": X})).by == "far"
        async with node("near", ServerOptions(grpc_uds=uds)), asyncio.timeout(10):
            while (await client.infer("linear", {"x": X})).by != "near":
                await asyncio.sleep(0.05)


async def test_with_every_endpoint_down_the_error_comes_quickly_and_names_them(tmp_path: Path) -> None:
    missing = f"unix:{tmp_path / 'missing.sock'}"
    with nobody() as down:
        async with AsyncClient([down, missing]) as client:
            for _ in range(2):
                start = time.monotonic()
                with pytest.raises(TargetUnreachable) as caught:
                    await client.infer("linear", {"x": X})
                assert time.monotonic() - start < 1.0
                assert down in str(caught.value)
                assert missing in str(caught.value)
            assert not await client.ready()
            with pytest.raises(TargetUnreachable):
                await client.index()


async def test_an_endpoint_that_comes_up_later_is_found_within_two_seconds(tmp_path: Path, bundle: Path) -> None:
    async with AsyncClient(f"unix:{tmp_path / 'node.sock'}") as client:
        assert not await client.ready()
        async with running(tmp_path, bundle):
            async with asyncio.timeout(2):
                while not await client.ready():
                    await asyncio.sleep(0.02)
            assert (await client.infer("linear", {"x": X})).by == "node"


async def test_an_endpoint_that_accepts_and_says_nothing_is_left_even_by_short_deadlines(
    tmp_path: Path, bundle: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with running(tmp_path, bundle) as at, AsyncClient([address, at.tcp]) as client:
            start, answers = time.monotonic(), 0
            async with asyncio.timeout(6):
                while answers < 5:
                    try:
                        await client.infer("linear", {"x": X}, timeout_s=0.3)
                        answers += 1
                    except DeadlineExceeded:
                        assert answers == 0  # once it has moved, it stays
            assert time.monotonic() - start < 3.0


async def test_a_device_only_call_goes_to_the_first_endpoint_or_nowhere(tmp_path: Path, bundle: Path) -> None:
    with nobody() as down:
        async with running(tmp_path, bundle) as at, AsyncClient([down, at.tcp]) as client:
            assert (await client.infer("linear", {"x": X})).by == "node"
            with pytest.raises(TargetUnreachable):
                await client.infer("linear", {"x": X}, privacy=Privacy.DEVICE_ONLY)
            assert len(at.asked) == 1
        async with running(tmp_path, bundle) as at, AsyncClient([at.tcp, down]) as client:
            assert (await client.infer("linear", {"x": X}, privacy=Privacy.DEVICE_ONLY)).target == "edge"


# --- which endpoint: the rules ---


def test_the_rotation_starts_with_the_first_and_goes_back_to_it_once_it_answers() -> None:
    rotation = Rotation(("a", "b", "c"))
    assert rotation.choose((), 0.0) == "a"
    rotation.failed("a", 0.0)
    assert rotation.choose(("a",), 0.0) == "b"
    assert rotation.choose((), 100.0) == "b"  # also after the cool-off of a: b works, and nobody has heard of a
    assert rotation.choose(("a", "b", "c"), 100.0) is None
    rotation.answered("a")
    assert rotation.choose((), 100.0) == "a"


def test_an_endpoint_that_failed_is_looked_at_by_one_at_a_time_and_only_where_it_is_nearer() -> None:
    rotation = Rotation(("a", "b", "c"))
    rotation.failed("c", 0.0)
    assert rotation.due(50.0) is None
    rotation.failed("a", 0.0)
    assert rotation.due(0.9) is None
    assert rotation.due(1.0) == "a"
    assert rotation.due(1.0) is None
    rotation.failed("a", 2.0)  # the look has found nothing
    assert rotation.due(3.9) is None
    assert rotation.due(4.0) == "a"
    assert rotation.choose((), 4.0) == "b"  # calls do not wait for that


def test_an_endpoint_that_failed_is_avoided_longer_each_time_and_for_a_bounded_time() -> None:
    rotation = Rotation(("a", "b"))
    now = 0.0
    waits: list[float] = []
    for _ in range(8):
        rotation.failed("a", now)
        rotation.failed("a", now)  # the other calls on the same connection do not count
        waits.append(_avoided_until(rotation) - now)
        now = _avoided_until(rotation)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert max(waits) == MAX_COOL_S
    rotation.answered("a")
    rotation.failed("a", now)
    assert _avoided_until(rotation) == now + 1


def _avoided_until(rotation: Rotation) -> float:
    return rotation._health["a"].avoid_until


def test_an_avoided_endpoint_is_still_tried_when_no_other_is_left() -> None:
    rotation = Rotation(("a", "b"))
    rotation.failed("b", 0.0)
    rotation.failed("a", 0.5)
    assert rotation.choose((), 0.6) == "b"  # its cool-off ends first
    assert rotation.choose(("b",), 0.6) == "a"


@pytest.mark.parametrize("bad", ["", "http://host:1", "host", "host:0", "host:65536", "unix:", ":80", "h o:80", 7])
def test_what_is_no_address_is_an_error_that_says_where(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"endpoints\[1\].*accepted: host:port or unix:/path"):
        AsyncClient(["127.0.0.1:8603", bad])  # type: ignore[list-item]


def test_addresses_are_kept_once_each_and_in_order() -> None:
    assert parse_endpoints("[::1]:80") == ("[::1]:80",)
    assert parse_endpoints(["unix:/a", "h.example:1", "unix:/a"]) == ("unix:/a", "h.example:1")
    with pytest.raises(ConfigError, match="there is none"):
        parse_endpoints([])


# --- the end ---


async def test_a_closed_client_says_so(tmp_path: Path, bundle: Path) -> None:
    async with running(tmp_path, bundle) as at:
        client = AsyncClient(at.tcp)
        with pytest.raises(RuntimeError, match="not open"):
            await client.infer("linear", {"x": X})
        async with client:
            at.slow_down(0.3)
            call = asyncio.create_task(client.infer("linear", {"x": X}))
            while not at.node.dataplane.in_flight:
                await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="closed"):
            await call
        with pytest.raises(RuntimeError, match="closed"):
            await client.ready()
        with pytest.raises(RuntimeError, match="closed"):
            await client.__aenter__()


# --- the synchronous twin ---


def test_a_client_that_gets_no_event_loop_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loop() -> asyncio.AbstractEventLoop:
        raise OSError("too many open files")

    monkeypatch.setattr(asyncio.events, "new_event_loop", no_loop)
    with pytest.raises(OSError, match="too many open files"):
        Client("127.0.0.1:8603")


def test_both_clients_have_the_same_methods() -> None:
    for name in ("infer", "ready", "metadata", "index", "load", "unload", "__init__"):
        parameters = [inspect.signature(getattr(kind, name)).parameters for kind in (AsyncClient, Client)]
        assert parameters[0] == parameters[1], name


def test_threads_share_a_client_and_a_kill_costs_them_no_call(tmp_path: Path, bundle: Path) -> None:
    with child_node(tmp_path, bundle) as (first, a), child_node(tmp_path / "b", bundle) as (_, b):
        with Client([a, b]) as client, ThreadPoolExecutor(8) as threads:
            assert client.ready()
            assert client.metadata("linear").versions == ("1",)
            client.unload("linear")
            client.load("linear")
            assert client.index()[0].state is ModelState.READY

            def call(i: int) -> None:
                if i == 200:
                    first.kill()
                x = np.array([[i, -i]], np.float32)
                answer = client.infer("linear", {"x": x}, timeout_s=5.0, priority=Priority.BATCH)
                np.testing.assert_allclose(answer.outputs["logits"], forward(x), rtol=1e-6)

            list(threads.map(call, range(600)))
            with pytest.raises(NotFound):
                client.infer("nope", {"x": X})
        assert not any(thread.name == "outrider-client" for thread in threading.enumerate())
        with pytest.raises(RuntimeError, match="closed"):
            client.infer("linear", {"x": X})
        client.close()  # again: nothing


async def test_closing_ends_the_calls_of_other_threads(tmp_path: Path, bundle: Path) -> None:
    async with running(tmp_path, bundle) as at:
        at.slow_down(0.5)
        client = Client(at.uds)
        call = asyncio.create_task(asyncio.to_thread(client.infer, "linear", {"x": X}))
        while not at.node.dataplane.in_flight:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(client.close)
        with pytest.raises(RuntimeError, match="closed"):
            await call
