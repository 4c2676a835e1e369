"""Collection on stores that were really published to; and what nodes make of it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from blake3 import blake3

from common.errors import BadRelease, FetchError, TrustError
from sync.agent.client import GrpcSource
from sync.agent.ports import Range
from sync.publisher import Publisher
from sync.release import Desired, desired_path, manifest_path, to_bytes
from sync.service import ServiceConfig
from sync.store import Store
from sync.trust.repository import Repository
from sync.trust.verifier import Verifier
from sync.upkeep.collect import Collected, collect
from sync.upkeep.repair import verify
from tests.sync.fakes import FakeClock, FakeInstaller, Killed, World, running, trained, weights


def publish(world: World, count: int, *, first: int = 1) -> None:
    """Each a small step in one tensor of the one before."""
    last = weights(rows=16)
    for version in range(1, first + count):
        if version >= first:
            world.publish(last)
        last = trained(last, "fc.weight", seed=version)


def slabs_of(world: World, *versions: int) -> set[str]:
    manifests = [world.publisher.manifest("digits", str(version)) for version in versions]
    return {slab for one in manifests if one is not None for slab in one.slabs()}


def names(store: Store, *folders: str) -> set[str]:
    return {one.name for one in store.files(*folders)}


def versions_here(store: Store) -> set[str]:
    return {name.split(".")[1] for name in names(store, "targets/releases") if name.endswith(".json")}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Six releases; nobody writes to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: None)
        world = World(tmp_path_factory.mktemp("template"))
        publish(world, 6)
    return world


@pytest.fixture
def store(template: World, tmp_path: Path) -> Store:
    return Store(Path(shutil.copytree(template.store.root, tmp_path / "store")))


# --- what stays ---


def test_what_is_desired_and_the_newest_others_stay_and_nothing_else(template: World, store: Store) -> None:
    kept = slabs_of(template, 6, 5, 4)
    digests = {version: template.publisher.manifest("digits", str(version)).digest() for version in (6, 5, 4)}  # type: ignore[union-attr]
    done = collect(store, keep=3)
    assert done.kept == {"digits": [6, 5, 4]}
    assert versions_here(store) == {"6", "5", "4"}
    assert {Path(name).stem for name in names(store, "objects")} == kept
    ends = {(Path(name).parent.name, Path(name).stem) for name in names(store, "packs")}
    assert ends == {(digests[6], digests[5]), (digests[6], digests[4]), (digests[5], digests[4])}
    assert {folder.name for folder in (store.root / "packs").iterdir()} == {digests[6], digests[5]}
    report = verify(store)
    assert report.is_good
    assert {state for kind in ("side", "object", "index", "pack") for state in report.counts[kind]} == {"good"}


def test_a_second_run_finds_nothing_to_do(store: Store) -> None:
    collect(store)
    again = collect(store)
    assert (again.removed, again.bytes_removed) == ({}, 0)


def test_a_dry_run_says_what_a_real_one_does_and_does_nothing(store: Store) -> None:
    before = names(store)
    said = collect(store, keep=2, is_dry_run=True)
    assert names(store) == before | {"lock"}
    done = collect(store, keep=2)
    assert (said.removed, said.bytes_removed, said.bytes_left) == (done.removed, done.bytes_removed, done.bytes_left)
    assert done.bytes_left == sum(one.size for one in store.files())


def test_less_than_two_are_never_kept(store: Store) -> None:
    assert collect(store, keep=0).kept == {"digits": [6, 5]}


def test_the_same_content_counts_once(world: World) -> None:
    publish(world, 2)
    world.publish(trained(weights(rows=16), "fc.weight", seed=1), force=True)
    assert collect(world.store, keep=2).kept == {"digits": [3, 1]}
    assert verify(world.store).is_good


def test_an_older_release_that_is_desired_stays_whatever_its_number(world: World) -> None:
    publish(world, 4)
    assign(world, 1)
    assert collect(world.store, keep=3).kept == {"digits": [1, 4, 3]}


def assign(world: World, version: int) -> Desired:
    """Signs that nodes should serve an older release again."""
    old, now = world.publisher.manifest("digits", str(version)), world.publisher.current("digits")
    assert old is not None
    assert now is not None
    repository = Repository(world.store, world.keys, clock=world.clock)
    data = repository.target(manifest_path("digits", str(version))) or b""
    desired = Desired(
        model="digits",
        epoch=now.epoch + 1,
        version=old.version,
        digest=old.digest(),
        manifest=manifest_path("digits", old.version),
        manifest_hash=blake3(data).hexdigest(),
    )
    repository.add({}, {desired_path("digits"): to_bytes(desired)})
    return desired


# --- quota ---


def test_a_quota_takes_packs_then_releases_and_says_what_it_misses(store: Store) -> None:
    everything = collect(store, keep=6, is_dry_run=True)
    assert everything.removed == {}
    packs = sum(one.size for one in store.files("packs"))
    no_packs = collect(store, keep=6, quota_bytes=everything.bytes_left - packs, is_dry_run=True)
    assert (no_packs.over_bytes, set(no_packs.removed)) == (0, {"index", "pack"})
    some = collect(store, keep=6, quota_bytes=everything.bytes_left - packs - 1)
    assert some.kept == {"digits": [6, 5, 4, 3, 2]}
    assert some.over_bytes == 0
    least = collect(store, keep=6, quota_bytes=1000)
    assert least.kept == {"digits": [6, 5]}
    assert least.over_bytes == least.bytes_left - 1000 == sum(one.size for one in store.files()) - 1000
    assert verify(store).is_good


# --- time ---


def test_what_a_crash_left_behind_goes_after_an_hour(store: Store) -> None:
    old, new = store.root / "objects/.tmp-01", store.root / "packs/.tmp-02"
    for path, age in ((old, 3601), (new, 3500)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    assert collect(store, keep=6).removed == {"temporary": 1}
    assert (old.exists(), new.exists()) == (False, True)


def test_replaced_metadata_goes_an_hour_later_and_roots_stay(store: Store, template: World) -> None:
    later = FakeClock(datetime.now(UTC) + timedelta(seconds=3700))
    assert collect(store, keep=6).removed == {}
    collect(store, keep=6, clock=later)
    signed = Repository(store, template.keys).signed()
    numbered = {f"metadata/{signed[role].version}.{role}.json" for role in ("root", "targets", "snapshot", "desired")}
    assert names(store, "metadata") == numbered | {"metadata/timestamp.json"}
    assert len(names(store, "targets/desired")) == 1
    assert verify(store).is_good


# --- damage ---


@pytest.mark.parametrize("pattern", ["metadata/timestamp.json", "metadata/*.targets.json", "targets/desired/*"])
def test_what_nobody_can_read_stops_it_before_anything_is_removed(store: Store, pattern: str) -> None:
    path = max(store.root.glob(pattern), key=lambda one: (one.stat().st_mtime_ns, one.name))
    path.write_bytes(path.read_bytes()[:-1])
    before = names(store)
    with pytest.raises((TrustError, BadRelease), match=path.name):
        collect(store, keep=2)
    assert names(store) == before | {"lock"}


def test_a_damaged_manifest_of_a_kept_release_stops_it(store: Store) -> None:
    (path,) = store.root.glob("targets/releases/digits/*.5.json")
    path.write_bytes(path.read_bytes().replace(b"conv", b"CONV"))
    before = names(store)
    with pytest.raises(BadRelease, match="digits/5"):
        collect(store, keep=2)
    assert names(store) == before | {"lock"}
    path.unlink()
    assert collect(store, keep=2).kept == {"digits": [6, 4]}


# --- crashes ---


class Crashing(Store):
    """Dies before its removal number `die_at`; keeps what it did, by kind."""

    die_at = -1

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.done: list[str] = []

    def remove(self, name: str) -> None:
        if len([one for one in self.done if one != "sync"]) == self.die_at:
            raise Killed
        super().remove(name)
        self.done.append(name)

    def sync(self) -> None:
        super().sync()
        self.done.append("sync")


def test_indexes_go_before_packs_and_manifests_before_objects_each_durably(store: Store) -> None:
    recording = Crashing(store.root)
    collect(recording, keep=2)
    steps = [step.split() for step in " ".join(recording.done).split("sync")]
    kinds = [{Path(name).suffix for name in step} for step in steps if step]
    assert kinds == [{".index"}, {".pack"}, {".zst"}, {".json"}, {".full"}]


def test_a_crash_anywhere_leaves_a_store_that_serves_and_the_next_run_ends_it(
    template: World, store: Store, tmp_path: Path
) -> None:
    whole = Store(Path(shutil.copytree(store.root, tmp_path / "whole")))
    count = sum(collect(whole, keep=2).removed.values())
    for number in range(0, count, 9):
        shutil.rmtree(store.root)
        crashing = Crashing(Path(shutil.copytree(template.store.root, store.root)))
        crashing.die_at = number
        with pytest.raises(Killed):
            collect(crashing, keep=2)
        assert verify(store).is_good
        collect(store, keep=2)
        assert names(store) == names(whole)


# --- nodes and publishers ---


class Interrupting:
    """A real source, whose first fetch of objects finds them collected."""

    def __init__(self, source: GrpcSource, world: World) -> None:
        self._source, self._world = source, world
        self.done: Collected | None = None

    def read(self, name: str) -> Iterator[bytes]:
        return self._source.read(name)

    def fetch(self, ranges: Sequence[Range]) -> Iterator[bytes | None]:
        if self.done is None and any(one.name.startswith("objects/") for one in ranges):
            for seed in (8, 9):
                self._world.publish(weights(seed, rows=16))
            self.done = collect(self._world.store, keep=2)
        return self._source.fetch(ranges)

    def close(self) -> None:
        self._source.close()


def test_a_node_in_the_middle_of_a_collected_release_takes_what_is_desired_then(
    world: World, installer: FakeInstaller
) -> None:
    world.publish(weights(1, rows=16))
    with running(ServiceConfig(store=str(world.store.root))) as address:
        source = Interrupting(GrpcSource(address, timeout_s=10), world)
        with world.agent(installer, source=source) as agent:
            assert not agent.run_once()
            assert source.done is not None
            assert source.done.kept == {"digits": [3, 2]}
            assert installer.serving == {}
            world.clock.advance(hours=1)
            assert agent.run_once()
    assert installer.serving == {"digits": "3"}
    arrived = world.folder / "node/models/digits/3/cpu-int8/model.safetensors"
    assert arrived.read_bytes() == (world.folder / "bundle/cpu-int8/model.safetensors").read_bytes()


def test_a_node_whose_release_was_collected_follows_with_whole_slabs(world: World, installer: FakeInstaller) -> None:
    publish(world, 1)
    with world.agent(installer) as agent:
        assert agent.run_once()
        publish(world, 2, first=2)
        assert collect(world.store, keep=2).kept == {"digits": [3, 2]}
        world.clock.advance(hours=1)
        assert agent.run_once()
    assert installer.serving == {"digits": "3"}


def test_a_collected_release_that_is_asked_for_is_told_as_missing(world: World, tmp_path: Path) -> None:
    publish(world, 1)
    first = world.publisher.current("digits")
    assert first is not None
    publish(world, 2, first=2)
    collect(world.store, keep=2)
    view = Verifier(tmp_path / "tuf", world.root.read_bytes(), world.source.read, world.clock).refresh()
    with pytest.raises(FetchError) as caught:
        view.manifest(first)
    assert caught.value.is_permanent
    assert world.publisher.manifest("digits", "1") is None


def listed(world: World) -> set[str]:
    return set(Repository(world.store, world.keys).listed("releases/digits/"))


def test_the_next_publish_takes_collected_releases_off_the_list(world: World) -> None:
    publish(world, 3)
    collect(world.store, keep=2)
    assert listed(world) == {f"releases/digits/{version}.json" for version in (1, 2, 3)}
    publish(world, 1, first=4)
    assert listed(world) == {f"releases/digits/{version}.json" for version in (2, 3, 4)}


def test_a_version_is_never_given_to_other_content(world: World) -> None:
    """Not even where the newest release was taken back, and lost."""
    publish(world, 3)
    assign(world, 1)
    for one in world.store.root.glob("targets/releases/digits/*.3.json"):
        one.unlink()
    assert collect(world.store, keep=2).kept == {"digits": [1, 2]}
    assert world.publish(weights(5, rows=16)).version == "4"
    assert listed(world) == {f"releases/digits/{version}.json" for version in (1, 2, 4)}


def test_differences_go_past_a_release_that_is_gone(world: World) -> None:
    publish(world, 2)
    one = world.publisher.manifest("digits", "1")
    (path,) = world.store.root.glob("targets/releases/digits/*.2.json")
    path.write_bytes(path.read_bytes().replace(b'"parent":"1"', b'"parent":"7"'))
    publish(world, 1, first=3)
    three = world.publisher.manifest("digits", "3")
    assert one is not None
    assert three is not None
    assert three.parent == "1"
    assert world.store.index(three.digest(), one.digest()) is not None


def test_as_many_bases_get_a_pack_as_one_asks_for(world: World) -> None:
    publish(world, 3)
    for version, bases in ((4, 0), (5, 3), (6, 1)):
        world.publisher = Publisher(world.store, world.keys, bases=bases, clock=world.clock)
        digest = world.publish(weights(version, rows=16)).digest
        assert len(list((world.store.root / "packs" / digest).glob("*.index"))) == bases


def test_publishing_the_same_again_mends_a_desired_release_whose_manifest_is_lost(world: World) -> None:
    publish(world, 1)
    (path,) = world.store.root.glob("targets/releases/digits/*.1.json")
    path.unlink()
    assert not verify(world.store).is_good
    again = world.publish(weights(rows=16))
    assert (again.version, again.is_new) == ("2", True)
    assert verify(world.store).is_good
    assert collect(world.store).kept == {"digits": [2]}
