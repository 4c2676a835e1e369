from __future__ import annotations

import contextlib
import random
import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import pytest

from common.errors import SyncError
from sync.agent.journal import Journal, Release
from sync.agent.states import Code, Record, State
from tests.sync.agent.test_states import desired
from tests.sync.fakes import FakeInstaller, World, trained, weights
from tests.sync.test_release import manifest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def test_what_was_entered_is_there_after_reopening(path: Path) -> None:
    journal = Journal(path)
    journal.enter(Record(model="digits"), State.ADMITTED, version="2", digest="d", code=Code.NEW, desired=desired())
    journal.save_floors({"timestamp": 7})
    journal.quarantine("digits", "dd", "full/torch", "1", "too bad")
    journal.count("digits", {"bytes_full": 3})
    journal.count("digits", {"bytes_full": 4})
    journal.close()
    again = Journal(path)
    assert again.record("digits") == Record(
        model="digits", state=State.ADMITTED, version="2", digest="d", code=Code.NEW, desired=desired()
    )
    assert again.floors() == {"timestamp": 7}
    assert again.quarantine_reason("digits", "dd", "full/torch") == "too bad"
    assert again.quarantine_reason("digits", "dd", "cpu-int8/onnxruntime") is None
    assert again.counters("digits") == {"bytes_full": 7}
    again.close()


def test_every_commit_reaches_the_disk(path: Path) -> None:
    journal = Journal(path)
    assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    journal.close()


def test_a_transaction_is_all_or_nothing(path: Path) -> None:
    journal = Journal(path)

    def dies_half_way() -> None:
        with journal.transaction():
            journal.count("digits", {"a": 1})
            journal.enter(Record(model="digits"), State.ADMITTED)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dies_half_way()
    assert (journal.counters("digits"), journal.record("digits").state) == ({}, State.IDLE)
    journal.close()


def test_releases_are_kept_with_what_was_built_from_them(path: Path) -> None:
    journal = Journal(path)
    release = Release(manifest=manifest(), variant="full", engine="torch")
    journal.save_release(release)
    assert journal.release("digits", "3") == release
    assert (release.plan, release.paths()) == ("full/torch", ("full/m.bin",))
    journal.forget_releases("digits", {"2"})
    assert journal.releases("digits") == ()
    journal.close()


def test_a_journal_of_a_later_version_is_not_touched(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(SyncError, match="schema 99"):
        Journal(path)


def filled(world: World) -> Path:
    """The folder of a node that serves version 2."""
    world.publish(weights())
    with world.agent(FakeInstaller()) as agent:
        assert agent.run_once()
        world.publish(trained(weights()))
        assert agent.run_once()
    return world.folder / "node"


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_in_the_journal_is_healed_or_without_effect(world: World, seed: int) -> None:
    node = filled(world)
    data = bytearray((node / "journal.db").read_bytes())
    at = 0 if seed == 0 else random.Random(seed).randrange(len(data))
    data[at] ^= 1 << seed % 8
    (node / "journal.db").write_bytes(data)
    installer = FakeInstaller()
    with world.agent(installer) as agent:
        agent.restore()
        assert set(installer.serving.values()) <= {"1", "2"}
        agent.run_once()
        assert agent.run_once()
        assert installer.serving == {"digits": "2"}


def test_a_damaged_journal_is_set_aside_and_nothing_is_fetched_that_is_here(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    node = filled(world)
    (node / "journal.db").write_bytes(b"not a database" * 1000)
    world.source.fetched.clear()
    installer = FakeInstaller()
    with world.agent(installer) as agent:
        agent.restore()
        assert agent.run_once()
    assert installer.serving == {"digits": "2"}
    assert world.source.fetched == []  # its files are still whole, and at their place
    assert "is damaged" in caplog.text
    assert (node / "journal.db.damaged").read_bytes().startswith(b"not a database")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE models SET state = 'COMITTED'",
        "UPDATE models SET code = '?'",
        "UPDATE models SET desired = '{'",
        "UPDATE releases SET manifest = '{}'",
        "UPDATE releases SET variant = 'cpu-int9'",
    ],
)
def test_rows_that_make_no_sense_are_damage(world: World, statement: str) -> None:
    node = filled(world)
    with sqlite3.connect(node / "journal.db") as db:
        db.execute(statement)
    db.close()
    installer = FakeInstaller()
    with world.agent(installer) as agent:
        agent.restore()
        assert agent.run_once()
    assert installer.serving == {"digits": "2"}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE models SET version = '1'",
        "UPDATE models SET active = '1', previous = NULL",
        "UPDATE models SET attempts = 1",
        "UPDATE releases SET manifest = replace(manifest, '1', '2')",
        "UPDATE floors SET version = version - 1 WHERE role = 'targets'",
        "UPDATE transitions SET code = 'errors'",
        "UPDATE counters SET value = value + 1",
    ],
)
def test_a_row_that_makes_sense_and_is_not_what_was_written_is_damage(
    world: World, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    node = filled(world)
    with sqlite3.connect(node / "journal.db") as db:
        assert db.execute(statement).rowcount
    db.close()
    installer = FakeInstaller()
    with world.agent(installer) as agent:
        assert "is not what was written" in caplog.text
        agent.restore()
        assert agent.run_once()
    assert installer.serving == {"digits": "2"}


def test_floors_and_quarantine_survive_a_damaged_journal_where_their_rows_are_whole(path: Path) -> None:
    with contextlib.closing(Journal(path)) as journal:
        journal.save_floors({"root": 1, "targets": 7})
        journal.save_time_floor(datetime(2026, 3, 1, tzinfo=UTC))
        journal.quarantine("digits", "d1", "cpu-int8/onnxruntime", "3", "loss 0.9")
        journal.enter(journal.record("digits"), State.IDLE, reason="as it was")
    with sqlite3.connect(path) as db:
        db.execute("UPDATE models SET reason = 'flipped'")
        db.execute("UPDATE floors SET version = 3 WHERE role = 'root'")
    db.close()
    with contextlib.closing(Journal(path)) as journal:
        assert journal.floors() == {"targets": 7}  # the row of root is not to be believed
        assert journal.time_floor() == datetime(2026, 3, 1, tzinfo=UTC)
        assert journal.quarantine_reason("digits", "d1", "cpu-int8/onnxruntime") == "loss 0.9"
        assert journal.records() == ()
