"""Cases of loading, ending and dying that users of other serving systems reported."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from cloud.config import GatewayConfig
from cloud.gateway import Gateway
from common.request import Request
from common.telemetry.events import EngineSwapped
from common.transport.grpc_client import OipClient
from common.transport.servers import ServerOptions
from edge import Node
from tests.bundles import WEIGHT, forward, write_bundle
from tests.cases.live import MODEL, HeldEngine, body, held_node, node_config, put, until

X = np.array([[1.0, 2.0]], np.float32)
LINEAR = "/v2/models/linear"


# --- 22: loading and unloading ---


async def test_case_22_versions_change_under_load_without_an_error_or_a_gap(tmp_path: Path) -> None:
    """Serving 22: a reload answers with errors, or the old version goes before the new one is up."""
    versions = ("1", "2", "3", "4", "5")
    folders = {v: write_bundle(tmp_path / v, weight=int(v) * WEIGHT) for v in versions}
    right = {v: forward(X, int(v) * WEIGHT).ravel() for v in versions}
    swaps: list[EngineSwapped] = []
    answered: list[str] = []
    closed_while: list[tuple[str, str]] = []

    def hear(event: object) -> None:
        if isinstance(event, EngineSwapped):
            swaps.append(event)

    async with Node(node_config(tmp_path), on_event=hear) as node:

        def watch_close(version: str) -> None:
            current = node.local.repository.current("linear")
            assert current is not None
            close = current.engine.close

            def closing() -> None:
                serving = node.local.repository.current("linear")
                closed_while.append((version, serving.version if serving else ""))
                close()

            current.engine.close = closing  # type: ignore[method-assign]

        async def load(session: aiohttp.ClientSession) -> None:
            while answered.count("5") < 20:
                async with session.post(f"{LINEAR}/infer", json=body()) as reply:
                    assert reply.status == 200
                    answer = await reply.json()
                np.testing.assert_allclose(answer["outputs"][0]["data"], right[answer["model_version"]], rtol=1e-6)
                answered.append(answer["model_version"])
                async with session.get(f"{LINEAR}/ready") as reply:
                    assert reply.status == 200

        await node.local.serve_bundle(folders["1"], "1")
        watch_close("1")
        async with asyncio.timeout(20), aiohttp.ClientSession(node.endpoint()["http"]) as session:
            loads = [asyncio.create_task(load(session)) for _ in range(6)]
            for version in versions[1:]:
                seen = len(answered)
                await until(lambda seen=seen: len(answered) > seen + 20)  # type: ignore[misc]
                await node.local.serve_bundle(folders[version], version)
                watch_close(version)
            await asyncio.gather(*loads)
    assert set(answered) == set(versions)
    assert [(one.old_version, one.new_version) for one in swaps[:5]] == [("", "1"), *pairwise(versions)]
    assert closed_while[:4] == list(pairwise(versions))  # when the old one went, the new one served


async def test_case_22_a_model_that_is_being_unloaded_is_not_ready_and_answers_what_it_took(tmp_path: Path) -> None:
    """Serving 22: "ready" while unloading, and what was queued is lost."""
    async with held_node(tmp_path) as (node, engine), aiohttp.ClientSession(node.endpoint()["http"]) as session:
        engine.hold()
        calls = [asyncio.create_task(node.infer(MODEL, {"x": X})) for _ in range(4)]  # one runs, three wait
        await until(lambda: engine.batches == [1])
        async with session.post(f"/v2/repository/models/{MODEL}/unload") as reply:
            assert reply.status == 200
        for path in (f"/v2/models/{MODEL}/ready", "/v2/health/ready"):
            async with session.get(path) as reply:
                assert reply.status == 503
        async with session.post(f"/v2/models/{MODEL}/infer", json=body()) as reply:
            assert reply.status == 503
            assert int(reply.headers["Retry-After"]) >= 1
        assert not engine.is_closed
        engine.let_go()
        assert {answer.stamp.version for answer in await asyncio.gather(*calls)} == {"1"}
        await until(lambda: engine.is_closed)


async def test_case_22_calls_that_wait_during_a_swap_are_answered_by_the_version_that_took_them(tmp_path: Path) -> None:
    """Serving 22: what waits during a swap runs on an engine that is closed, or on another version than it is told."""
    async with held_node(tmp_path) as (node, engine):
        engine.hold()
        old = [asyncio.create_task(node.infer(MODEL, {"x": X})) for _ in range(4)]
        await until(lambda: engine.batches == [1])
        second = HeldEngine()
        put(node.local, second, "2")
        new = [asyncio.create_task(node.infer(MODEL, {"x": X})) for _ in range(4)]
        await asyncio.sleep(0.01)
        assert not engine.is_closed
        engine.let_go()
        assert [answer.stamp.version for answer in await asyncio.gather(*old, *new)] == ["1"] * 4 + ["2"] * 4
        await until(lambda: engine.is_closed)
        assert not second.is_closed


# --- 23, 27: processes ---


@contextlib.asynccontextmanager
async def process(kind: tuple[str, str], folder: Path, toml: str) -> AsyncIterator[tuple[subprocess.Popen[bytes], Any]]:
    """`outrider KIND --config ...` with its endpoint file. Killed at the end, if it still runs."""
    folder.mkdir()
    config, endpoint = folder / "config.toml", folder / "endpoint.json"
    config.write_text(toml)
    command = (sys.executable, "-m", "common.cli", *kind, "--config", config, "--endpoint-file", endpoint)
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as running:
        try:
            async with asyncio.timeout(60):
                while not endpoint.exists():
                    assert running.poll() is None, (folder / "log").read_text()
                    await asyncio.sleep(0.02)
            yield running, json.loads(endpoint.read_text())
        finally:
            running.kill()


@pytest.mark.system
async def test_case_23_sigterm_under_load_costs_no_call(tmp_path: Path) -> None:
    """Serving 23: a process closes before the balancer has seen that it will."""
    bundle = write_bundle(tmp_path / "bundle")
    toml = f"""
        name = "node"
        cache.enabled = false
        [server]
        http_port = 0
        [[models]]
        bundle = "{bundle}"
    """
    said: list[int] = []  # what readiness was, in order
    after_notice = 0

    async with process(("edge", "run"), tmp_path / "node", toml) as (node, endpoint):

        async def balanced() -> None:
            """Calls as long as the node says that it is ready, and finishes what it began."""
            nonlocal after_notice
            async with aiohttp.ClientSession(endpoint["http"]) as session:
                while True:
                    async with session.get("/v2/health/ready") as reply:
                        said.append(reply.status)
                        is_last = reply.status == 503
                        if is_last:
                            assert int(reply.headers["Retry-After"]) >= 1
                    async with session.post(f"{LINEAR}/infer", json=body()) as reply:
                        assert reply.status == 200
                    after_notice += is_last
                    if is_last:
                        return

        callers = [asyncio.create_task(balanced()) for _ in range(4)]
        async with asyncio.timeout(20):
            await until(lambda: len(said) > 50)
            node.send_signal(signal.SIGTERM)
            await asyncio.gather(*callers)
        assert await asyncio.to_thread(node.wait, 15) == 0
    assert set(said) == {200, 503}
    assert after_notice == 4  # it still served when it was no longer ready


@pytest.mark.system
async def test_case_27_kill_9_of_one_of_three_workers_under_load_fails_no_call(tmp_path: Path) -> None:
    """Serving 27: the balancer prefers the dead worker, which has nothing in flight."""
    bundle = write_bundle(tmp_path / "bundle")
    toml = f"""
        name = "NAME"
        engine.variants = ["full"]
        engine.engines = ["onnxruntime"]
        engine.threads = 1
        [server]
        grpc_port = 0
        [[models]]
        bundle = "{bundle}"
    """
    answered: Counter[str] = Counter()
    async with contextlib.AsyncExitStack() as stack:
        names = ("w0", "w1", "w2")
        starting = (process(("cloud", "worker"), tmp_path / name, toml.replace("NAME", name)) for name in names)
        workers = await asyncio.gather(*(stack.enter_async_context(one) for one in starting))
        addresses = tuple(endpoint["grpc"] for _, endpoint in workers)
        gateway = await stack.enter_async_context(
            Gateway(GatewayConfig(workers=addresses, server=ServerOptions(grpc_port=0)))
        )
        client = await stack.enter_async_context(OipClient(str(gateway.endpoint()["grpc"])))
        request = Request(model="linear", inputs={"x": X})
        is_over = False

        async def load() -> None:
            while not is_over:
                answer = await client.infer(request)
                np.testing.assert_allclose(answer.outputs["logits"], forward(X), rtol=1e-6)
                answered[answer.stamp.by] += 1

        loads = [asyncio.create_task(load()) for _ in range(8)]
        async with asyncio.timeout(60):
            await until(lambda: min(answered[name] for name in names) > 50)
            workers[0][0].send_signal(signal.SIGKILL)
            killed, others = time.monotonic(), answered["w1"] + answered["w2"]
            await until(lambda: answered["w1"] + answered["w2"] > others + 500 and time.monotonic() > killed + 0.5)
            is_over = True
            await asyncio.gather(*loads)  # raises what any of them met
        text = gateway.metrics.render().decode()
    assert f'outrider_pool_redispatches_total{{member="{addresses[0]}"}}' in text  # some were on it when it died
