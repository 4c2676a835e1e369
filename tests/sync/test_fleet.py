"""What nodes report of themselves, and `outrider sync fleet`."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from common.cli import main
from common.errors import FolderUnusable
from sync.agent.reports import GrpcReports
from sync.fleet import DATABASE, MAX_MODELS, Fleet, ModelReport, read_fleet
from sync.pki.channel import PlainDialer
from sync.proto import sync_pb2, sync_pb2_grpc
from sync.service import ServiceConfig
from tests.sync.fakes import FakeInstaller, World, running, trained, weights


def one(model: str = "digits", active: str = "3", **changes: str) -> ModelReport:
    fields = {"state": "COMMITTED", "code": "SERVES", "reason": "", "version": "3"} | changes
    return ModelReport(model=model, active=active, epoch=7, **fields)


def test_a_node_replaces_what_it_said_before(tmp_path: Path) -> None:
    times = iter([10.0, 20.0, 30.0])
    fleet = Fleet(tmp_path / DATABASE, now=lambda: next(times))
    fleet.report("b", [one(), one("photos")], "")
    fleet.report("a", [], "no network")
    fleet.report("b", [one(active="4", reason="x" * 10_000)], "")
    first, second = read_fleet(tmp_path / DATABASE)  # while it is open
    assert (first.node, first.at, first.problem, first.models) == ("a", 20.0, "no network", ())
    assert (second.node, second.at, second.models) == ("b", 30.0, (one(active="4", reason="x" * 500),))
    fleet.close()
    assert read_fleet(tmp_path / DATABASE) == [first, second]


def test_what_is_no_database_is_an_error(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_bytes(b"this is no database" * 100)
    with pytest.raises(FolderUnusable):
        read_fleet(tmp_path / DATABASE)
    with pytest.raises(FolderUnusable):
        Fleet(tmp_path / DATABASE)


def test_nodes_tell_where_they_stand_after_each_poll(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    state, installer = world.folder / "state", FakeInstaller(bad={"2"})
    with running(ServiceConfig(store=str(world.store.root), state=str(state))) as address:
        reporter = GrpcReports(address, lambda: "edge-7", PlainDialer())
        world.publish(weights())
        with world.agent(installer, reporter=reporter) as agent:
            assert agent.run_once()
            (node,) = read_fleet(state / DATABASE)
            assert (node.node, node.models[0].active, node.models[0].epoch) == ("edge-7", "1", 1)
            world.publish(trained(weights()))
            assert agent.run_once()
    assert main(["sync", "fleet", str(state)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("edge-7  ")
    assert lines[1] == "  digits  serves 1  QUARANTINED 2  GATE_FAILED golden gate: loss 0.9 is over 0.02"
    assert lines[2:] == ["1 nodes, 0 late", "  digits 1: 1"]
    assert main(["sync", "fleet", str(state), "--json", "--late-s", "0"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [each["node"] for each in said["nodes"]] == ["edge-7"]
    assert said["nodes"][0]["models"][0]["code"] == "GATE_FAILED"
    assert main(["sync", "fleet", str(state), "--late-s", "0"]) == 0
    assert "LATE" in capsys.readouterr().out


def test_rollout_case_18_a_report_that_fails_changes_nothing(world: World) -> None:
    installer = FakeInstaller()
    world.publish(weights())
    with world.agent(installer, reporter=GrpcReports("127.0.0.1:1", lambda: "x", PlainDialer())) as agent:
        assert agent.run_once()
    assert installer.serving == {"digits": "1"}


@pytest.mark.parametrize(
    "request_",
    [
        sync_pb2.ReportRequest(node=""),
        sync_pb2.ReportRequest(node="n" * 129),
        sync_pb2.ReportRequest(node="a\x1b[2J"),
        sync_pb2.ReportRequest(node="a", models=[sync_pb2.ModelReport(model="")]),
        sync_pb2.ReportRequest(node="a", models=[sync_pb2.ModelReport(model="m")] * 2),
        sync_pb2.ReportRequest(node="a", models=[sync_pb2.ModelReport(model=str(n)) for n in range(MAX_MODELS + 1)]),
    ],
)
def test_reports_that_make_no_sense_are_refused(world: World, request_: sync_pb2.ReportRequest) -> None:
    state = world.folder / "state"
    with running(ServiceConfig(store=str(world.store.root), state=str(state))) as address:
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
            sync_pb2_grpc.SyncStub(channel).Report(request_, timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        assert read_fleet(state / DATABASE) == []


def test_a_huge_epoch_is_cut(world: World) -> None:
    state = world.folder / "state"
    with running(ServiceConfig(store=str(world.store.root), state=str(state))) as address:
        with grpc.insecure_channel(address) as channel:
            models = [sync_pb2.ModelReport(model="m", epoch=(1 << 64) - 1)]
            sync_pb2_grpc.SyncStub(channel).Report(sync_pb2.ReportRequest(node="a", models=models), timeout=10)
        assert read_fleet(state / DATABASE)[0].models[0].epoch == (1 << 63) - 1


def test_fleet_explains_what_it_was_not_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sync", "fleet", str(tmp_path)]) == 2
    assert "serve --state" in capsys.readouterr().err
