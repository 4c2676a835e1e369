"""Power loss: `python -m tests.power` has 500 images, each sync left out in turn, and 10,000 slabs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.power.check import Outcome, run, sample
from tests.power.disk import Disk, Image
from tests.power.log import Entry, Op, build
from tests.power.record import Recording, lives, on_disk, recorder, refused, same
from tests.power.small import Install, installs
from tests.power.syncs import sites, without


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = build(tmp_path_factory.mktemp("shim"))
    if found is None:
        pytest.skip("needs a C compiler: what a process does to its files is seen by a library of our own")
    return found


@pytest.fixture(scope="module")
def recording(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    with recorder(tmp_path_factory.mktemp("power") / "lives", library) as one:
        lives(one)
        yield one.recording()


@pytest.fixture(scope="module")
def second(library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[Install]]:
    """One node for two questions: starting it takes longer than they do."""
    with recorder(tmp_path_factory.mktemp("power") / "refused", library) as one:
        refused(one)
        written = one.recording()
        return run(written, at=written.after, rng=random.Random(4)), installs(one, 10, 200)


# --- the agent ---


def test_rollout_case_5_what_was_committed_outlives_a_power_loss(recording: Recording) -> None:
    outcome = sample(recording, count=20, seed=3)
    assert outcome.problems == []
    assert (outcome.images, outcome.kept > 10) == (20, True)


def test_what_is_refused_does_not_come_back_with_the_power(second: tuple[Outcome, list[Install]]) -> None:
    assert second[0].problems == []


def test_what_a_killed_process_left_unsynced_is_synced_by_the_next(recording: Recording) -> None:
    """Version 8 had its place when it died, version 9 its link, and the one before 11 had it back."""
    said = zip(recording.after, recording.marks, strict=True)
    at = [point for point, mark in said if mark.version in ("8", "9", "11")]
    assert run(recording, at=at + at[-1:] * 10, rng=random.Random(5)).problems == []


@pytest.mark.parametrize("name", ["files of a release", "models/MODEL: the name of a release", "current: the link"])
def test_a_sync_that_is_left_out_is_missed(recording: Recording, name: str) -> None:
    assert without(recording, name, count=150, seed=3).outcome.problems != []


def test_many_small_slabs_cost_no_more_syncs(second: tuple[Outcome, list[Install]]) -> None:
    few, many = second[1]
    assert many.slabs > 10 * few.slabs
    assert few.syncs - few.journal == many.syncs - many.journal


# --- the harness ---


def test_the_log_gives_what_is_on_the_disk(recording: Recording) -> None:
    assert same(recording.whole(), on_disk(recording)) == []
    assert {"state/node/journal.db", "state/node/models/digits/12/bundle.json"} <= recording.whole().keys()


def test_every_sync_of_the_agent_has_a_name(recording: Recording) -> None:
    assert sum(site is not None for site in sites(recording.entries)) == sum(
        entry.op is Op.SYNC for entry in recording.entries
    )


def call(op: Op, path: str = "", path2: str = "", inode: int = 0, offset: int = 0, data: bytes = b"") -> Entry:
    return Entry(op=op, path=path, path2=path2, only_data=False, inode=inode, offset=offset, data=data)


def losses(*calls: Entry) -> list[Image]:
    disk = Disk()
    for one in calls:
        disk.apply(one)
    return [disk.after_power_loss(random.Random(seed)) for seed in range(1000)]


FILE = (call(Op.CREATE, "a", inode=1), call(Op.WRITE, inode=1, data=b"x" * 1024))
SYNC_FILE, SYNC_FOLDER = call(Op.SYNC, "a", inode=1), call(Op.SYNC, inode=9)


def test_a_name_and_what_it_leads_to_are_synced_apart() -> None:
    found = losses(*FILE)
    assert {} in found  # neither
    assert {"a": b""} in found  # the name alone
    assert {"a": bytes(1024)} in found  # and the size
    assert {"a": b"x" * 512 + bytes(512)} in found  # and a sector
    assert {tuple(image) for image in losses(*FILE, SYNC_FILE)} == {(), ("a",)}
    assert {image["a"] for image in losses(*FILE, SYNC_FILE) if image} == {b"x" * 1024}
    assert {image["a"] for image in losses(*FILE, SYNC_FOLDER)} >= {b"", b"x" * 1024}
    assert losses(*FILE, SYNC_FILE, SYNC_FOLDER) == [{"a": b"x" * 1024}] * 1000


def test_a_rename_is_done_or_not() -> None:
    here = (*FILE, SYNC_FILE, SYNC_FOLDER, call(Op.RENAME, "a", "b"))
    assert {tuple(image) for image in losses(*here)} == {("a",), ("b",)}
    assert {tuple(image) for image in losses(*here, SYNC_FOLDER)} == {("b",)}


def test_a_file_that_was_removed_may_come_back() -> None:
    here = (*FILE, SYNC_FILE, SYNC_FOLDER, call(Op.REMOVE, "a"))
    assert {tuple(image) for image in losses(*here)} == {(), ("a",)}
    assert {tuple(image) for image in losses(*here, SYNC_FOLDER)} == {()}
