from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from common.errors import SyncError
from sync.agent.journal import Journal, Release
from sync.agent.states import Code, Record, State
from tests.sync.agent.test_states import desired
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
