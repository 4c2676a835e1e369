"""The whole way with certificates: service, broker and an agent that enrols late, hears hints and renews."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest

from common.errors import ConfigError
from sync.agent.running import SyncOptions, running_agent
from sync.broker import broker
from sync.fleet import DATABASE, read_fleet
from sync.pki.authority import Authority
from sync.pki.channel import CertifiedDialer
from sync.pki.identity import Identity
from sync.proto import sync_pb2, sync_pb2_grpc
from sync.service import ServiceConfig, service
from tests.sync.fakes import FakeInstaller, World, weights
from tests.sync.pki.devices import enrolled
from tests.sync.test_hints import eventually


async def test_an_agent_that_is_enrolled_while_it_runs_installs_hears_and_renews(
    world: World, authority: Authority, installer: FakeInstaller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sync.pki.identity._LOOK_S", 0.02)
    world.publish(weights(0))
    async with contextlib.AsyncExitStack() as stack:
        mqtt = await stack.enter_async_context(broker(ca=authority.folder))
        config = ServiceConfig(
            store=str(world.store.root),
            ca=str(authority.folder),
            broker=mqtt,
            group="north",
            state=str(tmp_path / "state"),
        )
        address = await stack.enter_async_context(service(config, drain_s=0.2))
        options = SyncOptions(
            source=address,
            root=str(world.root),
            broker=mqtt,
            group="north",
            identity=str(tmp_path / "edge-a"),
            ca=str(authority.root_file),
            interval_s=900.0,
            min_gap_s=0.05,
            probation_s=0.0,
        )
        agent = await stack.enter_async_context(
            running_agent(options, tmp_path / "agent", installer, name="node-1", engines=("onnxruntime",))
        )
        assert agent is not None
        assert await eventually(lambda: "outrider sync enrol" in (agent.last_error or ""))
        enrolled(authority, tmp_path / "edge-a", "edge-a", group="north")
        assert await eventually(lambda: installer.serving == {"digits": "1"}, within_s=10)
        assert await eventually(lambda: reported(tmp_path / "state") == [("edge-a", "1")])  # by its certificate's name
        identity = Identity(tmp_path / "edge-a", authority.root_file)
        first = identity.current().facts.serial
        monkeypatch.setattr("sync.pki.identity.is_due", lambda facts, now: facts.serial == first)
        assert await eventually(lambda: identity.current().facts.serial != first)
        await asyncio.to_thread(authority.revoke, first)  # the old one is not needed any more
        await asyncio.to_thread(world.publish, weights(1))
        assert await eventually(lambda: installer.serving == {"digits": "2"}, within_s=10)


def reported(state: Path) -> list[tuple[str, str]]:
    return [(node.node, one.active) for node in read_fleet(state / DATABASE) for one in node.models]


async def test_nobody_reports_for_another_node(world: World, authority: Authority, tmp_path: Path) -> None:
    enrolled(authority, tmp_path / "edge-a", "edge-a", group="north")
    config = ServiceConfig(store=str(world.store.root), ca=str(authority.folder), state=str(tmp_path / "state"))
    async with service(config, drain_s=0.2) as address:

        def report(name: str) -> None:
            channel = CertifiedDialer(Identity(tmp_path / "edge-a", authority.root_file)).connect(address, ())
            with channel:
                sync_pb2_grpc.SyncStub(channel).Report(sync_pb2.ReportRequest(node=name), timeout=10)

        await asyncio.to_thread(report, "edge-a")
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(report, "edge-b")
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED  # type: ignore[attr-defined]
    assert [node.node for node in read_fleet(tmp_path / "state" / DATABASE)] == ["edge-a"]


async def test_a_service_with_a_folder_that_is_no_ca_does_not_start(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="outrider sync ca init"):
        async with service(ServiceConfig(store=str(world.store.root), ca=str(tmp_path / "none"))):
            pass
