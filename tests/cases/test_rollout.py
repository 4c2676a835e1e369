"""Cases of rollouts that users of other systems reported: a live node, real engines, the agent that brings versions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from common.bundle import Variant
from common.errors import EngineUnavailable
from edge import Node
from hardware.install import EngineInstaller
from sync.agent import Agent, Staged
from sync.agent.probation import ProbationLimits
from sync.trust.repository import Repository
from tests.bundles import WEIGHT, forward, write_bundle
from tests.cases.live import body, node_config
from tests.sync.fakes import Killed, World

X = np.array([[1.0, 2.0]], np.float32)


@dataclass
class Stopping:
    """The node's own installer, which can be made to stop short of a step. `at` maps a method to what it raises."""

    real: EngineInstaller
    at: dict[str, BaseException] = field(default_factory=dict)

    def can_run(self, model: str, engine: str, variant: Variant) -> bool:
        return self.real.can_run(model, engine, variant)

    def prepare(self, staged: Staged) -> Any:
        self._stop("prepare")
        return self.real.prepare(staged)

    def gate(self, prepared: Any) -> Any:
        return self.real.gate(prepared)

    def activate(self, prepared: Any) -> None:
        self._stop("activate")
        self.real.activate(prepared)

    def discard(self, prepared: Any) -> None:
        self.real.discard(prepared)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def _stop(self, step: str) -> None:
        if step in self.at:
            raise self.at[step]


class Rig:
    """A publisher, and a node with its agent that can be started again."""

    session: aiohttp.ClientSession
    node: Node

    def __init__(self, world: World) -> None:
        self.world = world
        self.stop_at: dict[str, BaseException] = {}

    def publish(self, version: int, model: str = "linear") -> None:
        folder = write_bundle(self.world.folder / f"{model}-{version}", name=model, weight=version * WEIGHT)
        assert self.world.publisher.publish(folder).version == str(version)

    @asynccontextmanager
    async def started(self, **options: Any) -> AsyncIterator[Agent]:
        """The process as it starts: what was committed is restored, nothing has been polled yet."""
        async with (
            Node(node_config(self.world.folder)) as self.node,
            aiohttp.ClientSession(self.node.endpoint()["http"]) as self.session,
        ):
            installer = Stopping(self.node.local.installer, self.stop_at)
            with self.world.agent(installer, "sync", **options) as agent:  # type: ignore[arg-type]
                await asyncio.to_thread(agent.restore)
                yield agent

    async def serves(self, version: int | None, model: str = "linear") -> None:
        """What a caller that names no version is answered by, with the right numbers, and what the index says."""
        async with self.session.post(f"/v2/models/{model}/infer", json=body()) as reply:
            if version is None:
                assert reply.status in (404, 503)
                return
            assert reply.status == 200
            answer = await reply.json()
        assert answer["model_version"] == str(version)
        assert reply.headers["x-outrider-version"] == str(version)
        np.testing.assert_allclose(answer["outputs"][0]["data"], forward(X, version * WEIGHT).ravel(), rtol=1e-6)
        async with self.session.get("/v2/repository/index") as reply:
            index = {(one["name"], one["version"]): one["state"] for one in await reply.json()}
        assert index[model, str(version)] == "READY"
        assert [v for m, v in index if m == model] == [str(version)]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr("os.fsync", lambda fd: None)  # no test here cuts the power
    return Rig(World(tmp_path))


NOT_NOW = EngineUnavailable("onnxruntime", "the accelerator is busy")


async def poll(agent: Agent) -> bool:
    return await asyncio.to_thread(agent.run_once)


# --- 6: metadata that expires between download and activation ---


async def test_rollout_case_6_metadata_that_expires_after_the_download_stops_the_new_version_only(rig: Rig) -> None:
    """Rollout 6: the signatures run out between download and activation, and the client breaks."""
    rig.publish(1)
    async with rig.started() as agent:
        assert await poll(agent)
        rig.publish(2)
        rig.stop_at["prepare"] = NOT_NOW
        assert not await poll(agent)
        assert (agent.status()[0].state, agent.status()[0].code) == ("WAITING", "NOT_READY")  # all of it is here
        rig.world.clock.advance(days=30)
        rig.stop_at.clear()
        for _ in range(3):
            assert not await poll(agent)
        assert "expired" in (agent.last_error or "")
        await rig.serves(1)
    async with rig.started() as agent:  # a restart needs no valid signature for what was installed
        assert not await poll(agent)
        await rig.serves(1)
        Repository(rig.world.store, rig.world.keys, clock=rig.world.clock).renew()
        rig.world.source.fetched.clear()
        assert await poll(agent)
        await rig.serves(2)
        assert rig.world.source.fetched == []  # the download was not lost


async def test_rollout_case_6_metadata_that_expires_during_the_download_breaks_nothing(rig: Rig) -> None:
    """Rollout 6: it was valid when the install was admitted: that install ends, and the next one waits."""
    rig.publish(1)
    async with rig.started() as agent:
        assert await poll(agent)
        rig.publish(2)

        def later(_name: str, data: bytes) -> bytes:
            if rig.world.source.fetched:
                rig.world.clock.advance(days=30)
            return data

        rig.world.source.fetched.clear()
        rig.world.source.tamper = later
        assert await poll(agent)
        await rig.serves(2)
        assert not await poll(agent)
        assert "expired" in (agent.last_error or "")
        await rig.serves(2)


# --- 22: half-copied models, and one bad load ---


async def test_rollout_case_22_a_release_that_is_half_there_is_never_loaded(rig: Rig) -> None:
    """Rollout 22: a poll of the folder sees a model while it is being copied."""
    rig.publish(1)
    async with rig.started() as agent:
        assert await poll(agent)
        rig.publish(2)
        await asyncio.to_thread(_cut_off, rig, agent)
        await rig.serves(1)
    models = rig.world.folder / "sync/models/linear"
    assert {path.name for path in models.iterdir()} == {"1"}
    (models / "9").mkdir()  # somebody copies a model in by hand, and has not finished
    (models / "9" / "bundle.json").write_bytes(b'{"model": ')
    async with rig.started() as agent:  # the process starts again
        await rig.serves(1)
        assert await poll(agent)
        await rig.serves(2)
        assert await poll(agent)
        await rig.serves(2)


def _cut_off(rig: Rig, agent: Agent) -> None:
    """The process dies when the second slab arrives."""

    def die(_name: str, data: bytes) -> bytes:
        if len(rig.world.source.fetched) > 1:
            raise Killed
        return data

    rig.world.source.fetched.clear()
    rig.world.source.tamper = die
    with pytest.raises(Killed):
        agent.run_once()
    rig.world.source.tamper = lambda _name, data: data


async def test_rollout_case_22_after_a_bad_version_the_next_one_is_loaded_and_other_models_are_not_held_up(
    rig: Rig,
) -> None:
    """Rollout 22: one load that fails, and nothing is reloaded any more."""
    rig.publish(1)
    rig.publish(1, model="other")
    async with rig.started() as agent:
        assert await poll(agent)
        folder = write_bundle(rig.world.folder / "bad", weight=2 * WEIGHT)
        (folder / "cpu-int8/model.onnx").write_bytes(b"\x08\x07garbage")
        rig.world.publisher.publish(folder)
        rig.publish(2, model="other")
        await poll(agent)
        await rig.serves(1)
        await rig.serves(2, model="other")
        states = {status.model: status.state for status in agent.status()}
        assert states == {"linear": "QUARANTINED", "other": "COMMITTED"}
        rig.publish(3)
        assert await poll(agent)
        await rig.serves(3)


# --- 23: staged is not served ---


async def test_rollout_case_23_a_staged_version_is_no_default_before_it_is_activated(rig: Rig) -> None:
    """Rollout 23: a version that was only staged became the default, silently or after a restart."""
    rig.publish(1)
    async with rig.started() as agent:
        assert await poll(agent)
        rig.publish(2)
        rig.stop_at["prepare"] = NOT_NOW
        assert not await poll(agent)
        assert (rig.world.folder / "sync/models/linear/2").is_dir()  # complete, and at its final place
        await rig.serves(1)
        async with rig.session.post("/v2/models/linear/versions/2/infer", json=body()) as reply:
            assert reply.status == 404
        for action in ("unload", "load"):  # an operator's load brings back what serves, not what lies there
            async with rig.session.post(f"/v2/repository/models/linear/{action}") as reply:
                assert reply.status == 200
        await rig.serves(1)
    rig.stop_at.clear()
    async with rig.started() as agent:
        await rig.serves(1)
        rig.stop_at["activate"] = Killed()  # the gate passed, and the process died before the swap
        with pytest.raises(Killed):
            await poll(agent)
        assert agent.status()[0].state == "GATED"
        await rig.serves(1)
    rig.stop_at.clear()
    async with rig.started() as agent:
        await rig.serves(1)
        assert await poll(agent)
        await rig.serves(2)


# --- what only callers find out: a version that passes its golden set and fails them ---


def break_for_large_inputs(folder: Path) -> None:
    """The model looks up a table of one row for inputs over 50, where the second is meant: an error at run time."""
    for path in folder.glob("*/model.onnx"):
        model = onnx.load(path)
        graph = model.graph
        graph.node[0].output[0] = "sound"
        nodes = [("Greater", ["x", "limit"], "is_large", {}), ("Cast", ["is_large"], "at", {"to": TensorProto.INT64})]
        nodes += [("Gather", ["table", "at"], "found", {}), ("ReduceSum", ["found", "axis"], "sum", {})]
        nodes += [("Add", ["sound", "sum"], "logits", {})]
        graph.node.extend(helper.make_node(kind, inputs, [output], **more) for kind, inputs, output, more in nodes)
        constants = {"limit": np.float32(50), "table": np.zeros(1, np.float32), "axis": np.array([1], np.int64)}
        graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items())
        onnx.save(model, path)


async def test_a_version_that_fails_its_callers_is_taken_back_within_a_second(rig: Rig) -> None:
    limits = ProbationLimits(seconds=60.0)
    rig.publish(1)
    async with rig.started(probation=ProbationLimits(seconds=0)) as agent:
        assert await poll(agent)
    async with rig.started(probation=limits, clock=None) as agent:
        await rig.serves(1)
        folder = write_bundle(rig.world.folder / "linear-2", weight=2 * WEIGHT)
        break_for_large_inputs(folder)
        rig.world.publisher.publish(folder)
        agent.start()
        while agent.status()[0].state != "PROBATION":
            await asyncio.sleep(0.01)
        await rig.serves(2)
        statuses = []
        for _ in range(3):
            async with rig.session.post("/v2/models/linear/infer", json=body((1000.0, 2.0))) as reply:
                statuses.append(reply.status)
        failed = time.monotonic()
        assert statuses == [500, 500, 500]
        while agent.status()[0].state != "QUARANTINED":
            await asyncio.sleep(0.01)
        took_s = time.monotonic() - failed
        await rig.serves(1)
        assert agent.status()[0].reason.startswith("3 of 4 calls failed in version 2")
    assert took_s < 5  # 0.2 s on an idle machine; the limit is for a busy one


async def test_a_good_version_is_committed_after_its_golden_set_ran_once_more_beside_callers(rig: Rig) -> None:
    rig.publish(1)
    async with rig.started(probation=ProbationLimits(seconds=0.3), clock=None) as agent:
        agent.start()
        while not agent.status() or agent.status()[0].state != "COMMITTED":
            if agent.status() and agent.status()[0].active:
                await rig.serves(1)
            await asyncio.sleep(0.01)
        loaded = rig.node.local.repository.current("linear")
        assert loaded is not None
        assert loaded.tally.errors == 0
        assert loaded.tally.answers >= 2  # 16 rows of the golden set in batches of 8
