"""`outrider sync agent` and `outrider sync why`, as they are called."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from common.cli import main
from common.errors import FetchError
from common.serving.vitals import Vitals
from sync.agent.journal import MAX_TRANSITIONS, Journal, Poll
from sync.agent.probation import ProbationLimits
from sync.agent.states import Record, State
from sync.agent.window import Window
from sync.fleet import read_fleet
from sync.service import ServiceConfig
from tests.sync.fakes import FakeInstaller, World, running, trained, weights


def agent(world: World, address: str, *flags: str) -> int:
    where = ("--folder", str(world.folder / "node"), "--root", str(world.root), "--source", address)
    return main(["sync", "agent", *where, "--once", *flags])


def test_an_agent_alone_brings_the_files_and_a_link_to_them(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    current = world.folder / "node/current/digits"
    with running(ServiceConfig(store=str(world.store.root))) as address:
        world.publish(weights())
        assert agent(world, address, "--variant", "full", "--engine", "torch") == 0
        assert "digits: COMMITTED version 1, serves 1" in capsys.readouterr().out
        assert (current / "full/model.safetensors").read_bytes() == (
            world.folder / "bundle/full/model.safetensors"
        ).read_bytes()
        assert not (current / "cpu-int8").exists()
        world.publish(trained(weights()))
        assert agent(world, address, "--variant", "full", "--engine", "torch") == 0
    assert os.readlink(current) == str((world.folder / "node/models/digits/2").resolve())
    assert {path.name for path in (world.folder / "node/current").iterdir()} == {"digits"}


def test_an_agent_alone_says_what_keeps_it(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert agent(world, "127.0.0.1:1") == 1
    assert "UNAVAILABLE" in capsys.readouterr().err
    assert agent(world, "127.0.0.1:1", "--window", "25:00-26:00") == 2
    assert "HH:MM-HH:MM" in capsys.readouterr().err


def asked(node: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    assert main(["sync", "why", str(node), *flags]) == 0
    return capsys.readouterr().out


def test_why_tells_what_serves_and_why_not_more(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    node, installer = world.folder / "node", FakeInstaller()
    with world.agent(installer) as one:
        assert "no model yet" in asked(node, capsys)
        world.publish(weights())
        assert one.run_once()
        assert "SERVES" in asked(node, capsys)
        installer.bad.add("2")
        world.publish(trained(weights()))
        assert one.run_once()
        text = asked(node, capsys)  # beside the agent that is at work
    assert asked(node, capsys) == text  # and without it
    lines = {line.split()[0]: line.split(maxsplit=1)[-1] for line in text.splitlines()[1:8]}
    assert lines["desired"] == "version 2 (epoch 2)"
    assert lines["serves"] == "version 1"
    assert lines["state"] == "QUARANTINED version 2"
    assert lines["reason"] == "GATE_FAILED: golden gate: loss 0.9 is over 0.02"
    assert lines["changes"] == "another desired release, or another engine or variant on this node"
    assert lines["next"] == "try   not this content: it was refused for good"
    assert "BUILDING -> QUARANTINED  version 2  GATE_FAILED" in text.splitlines()[9]


def test_why_as_json(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    installer = FakeInstaller()
    world.publish(weights())
    with world.agent(installer, probation=ProbationLimits(seconds=60.0)) as one:
        assert one.run_once()
        installer.measured["digits"] = Vitals(version="1", answers=0, errors=7, latency_s=None), None
        one.look()
    (found,) = json.loads(asked(world.folder / "node", capsys, "digits", "--json"))["models"]
    assert (found["model"], found["active"], found["state"], found["code"]) == ("digits", None, "CLOUD_ONLY", "ERRORS")
    assert found["desired"] == {"version": "1", "epoch": 1}
    states = ["CLOUD_ONLY", "ROLLING_BACK", "PROBATION", "GATED", "BUILDING", "STAGED", "FETCHING", "ADMITTED"]
    assert [one["new"] for one in found["transitions"]] == states
    assert [one["old"] for one in found["transitions"]] == [*states[1:], "IDLE"]


def test_why_says_when_the_window_opens(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    now = world.clock.now()
    start = (60 * now.hour + now.minute + 600) % 1440
    world.publish(weights())
    with world.agent(FakeInstaller(), window=Window(start, (start + 5) % 1440)) as one:
        assert one.run_once()
    text = asked(world.folder / "node", capsys, "digits")
    assert f"at {now.strftime('%Y-%m-%d')}" in text or "at " in text
    assert f"{start // 60:02}:{start % 60:02}:00 UTC" in text
    assert "serves     nothing here: the cloud answers" in text


def test_why_explains_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sync", "why", str(tmp_path)]) == 2
    assert "a node's state folder" in capsys.readouterr().err
    (tmp_path / "journal.db").write_bytes(b"not a database, but long enough to be looked at" * 30)
    assert main(["sync", "why", str(tmp_path)]) == 1
    assert "journal.db" in capsys.readouterr().err
    (tmp_path / "journal.db").unlink()
    Journal(tmp_path / "journal.db").close()
    assert main(["sync", "why", str(tmp_path), "digits"]) == 2
    assert "knows no model 'digits'" in capsys.readouterr().err


def test_the_journal_remembers_the_last_transitions_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db", now=lambda: 5.0)
    record = Record(model="digits")
    for number in range(MAX_TRANSITIONS + 10):
        record = journal.enter(record, State.IDLE, reason=str(number))
        journal.enter(Record(model="other"), State.IDLE)
    assert [one.reason for one in journal.transitions("digits")] == [str(n) for n in range(59, 9, -1)]
    assert (len(journal.transitions("other")), journal.transitions("other")[0].at) == (MAX_TRANSITIONS, 5.0)
    journal.close()


def test_a_journal_of_the_first_schema_is_taken_over(tmp_path: Path) -> None:
    import sqlite3

    from sync.agent import journal as module

    path = tmp_path / "journal.db"
    with sqlite3.connect(path) as db:
        db.executescript(module._MIGRATIONS[0])
        db.execute("INSERT INTO models VALUES ('digits', 'COMMITTED', '3', 'd', '', 0, '3', '2', NULL)")
        db.execute("PRAGMA user_version = 1")
    db.close()
    journal = Journal(path)
    assert journal.record("digits") == Record(
        model="digits", state=State.COMMITTED, version="3", digest="d", active="3", previous="2"
    )
    journal.close()


def test_why_says_that_the_last_poll_did_not_get_through(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    node = world.folder / "node"
    with world.agent(FakeInstaller()) as one:
        assert "last poll  none yet" in asked(node, capsys)
        world.source.error = FetchError("metadata/timestamp.json", "UNAUTHENTICATED: the certificate was revoked")
        assert not one.run_once()
        text = asked(node, capsys)  # with no model yet
        assert "did NOT get through (none before got through): fetching metadata/timestamp.json" in text
        world.source.error = None
        world.publish(weights())
        assert one.run_once()
        began = world.clock.now().strftime("%Y-%m-%d %H:%M:%S UTC")
        assert f"last poll  {began}, got through" in asked(node, capsys)
        world.clock.advance(hours=1)
        world.source.error = FetchError("metadata/timestamp.json", "UNAUTHENTICATED: the certificate was revoked")
        assert not one.run_once()
    text = asked(node, capsys)
    assert f"did NOT get through (the last that did: {began})" in text
    assert "the certificate was revoked" in text
    assert "attack" not in text  # it was an answer
    poll = json.loads(asked(node, capsys, "--json"))["poll"]
    assert poll["at"] - poll["through_at"] == pytest.approx(3600, abs=1)


def test_polls_that_are_alike_are_noted_once_a_minute(tmp_path: Path) -> None:
    clock = [1000.0]
    with closing(Journal(tmp_path / "journal.db", now=lambda: clock[0])) as journal:
        for clock[0] in (1000.0, 1010.0, 1059.0):
            journal.save_poll("")
        assert journal.poll() == Poll(at=1000.0, through_at=1000.0, problem="")
        journal.save_poll("gone")  # what is new is noted at once
        assert journal.poll() == Poll(at=1059.0, through_at=1000.0, problem="gone")
        clock[0] = 1200.0
        journal.save_poll("gone")
        assert journal.poll() == Poll(at=1200.0, through_at=1000.0, problem="gone")


def test_a_single_poll_reports_too(world: World) -> None:
    state = world.folder / "state"
    with running(ServiceConfig(store=str(world.store.root), state=str(state))) as address:
        world.publish(weights())
        assert agent(world, address, "--name", "kitchen") == 0
    (node,) = read_fleet(state / "fleet.db")
    assert (node.node, [(one.model, one.active) for one in node.models]) == ("kitchen", [("digits", "1")])


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (
            ("--source", "127.0.0.1"),
            "source must be host:port, http://, https:// or s3://bucket/prefix, got '127.0.0.1'",
        ),
        (("--source", "h:1", "--broker", "b"), "broker must be host:port, got 'b'"),
    ],
)
def test_an_address_that_is_none_is_said_at_once(
    world: World, given: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--folder", str(world.folder / "node"), "--root", str(world.root))
    assert main(["sync", "agent", *where, "--once", *given]) == 2
    assert what in capsys.readouterr().err
    assert not (world.folder / "node").exists()
