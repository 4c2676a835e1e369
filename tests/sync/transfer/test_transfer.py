"""Releases carried in a file to a store that trusts the publisher's root and has no keys."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, MetadataExpired, StoreBusy, TransferRefused
from sync.agent import Agent
from sync.events import SlabsFetched
from sync.service import ServiceConfig
from sync.store import TIMESTAMP, Store
from sync.transfer.export import export
from sync.transfer.take_in import TakenIn, take_in
from sync.trust.repository import Repository
from sync.upkeep.collect import collect
from tests.sync.fakes import FakeClock, FakeInstaller, World, running, trained, weights


@dataclass
class Island:
    """A store that no network reaches, in `folder`, and a node beside it."""

    world: World
    folder: Path
    installer: FakeInstaller = field(default_factory=lambda: FakeInstaller(variants=("full",)))

    @property
    def store(self) -> Store:
        return Store(self.folder / "island")

    @property
    def file(self) -> Path:
        return self.folder / "carried.zip"

    def export(self, **options: Any) -> Path:
        export(self.world.store, self.file, clock=self.world.clock, **options)
        return self.file

    def take_in(self, file: Path | None = None, store: Store | None = None) -> TakenIn:
        root = self.world.root.read_bytes()
        return take_in(file or self.file, store or self.store, root=root, clock=self.world.clock)

    def agent(self, address: str, **options: Any) -> Agent:
        return self.world.agent(self.installer, source=None, address=address, **options)


@pytest.fixture
def island(world: World) -> Island:
    return Island(world, world.folder)


def small(seed: int = 0) -> dict[str, Any]:
    return weights(seed, rows=16)


def files(store: Store) -> dict[str, bytes]:
    return {one.name: (store.root / one.name).read_bytes() for one in store.files()}


# --- the straight way ---


def test_what_was_carried_is_served_without_keys_and_the_next_one_as_a_difference(island: Island) -> None:
    world = island.world
    world.publish(small())
    first = island.export().stat().st_size
    assert island.take_in().releases == {"digits": "1"}
    with running(ServiceConfig(store=str(island.store.root))) as address, island.agent(address) as agent:
        assert agent.run_once(), agent.last_error
        assert island.installer.serving == {"digits": "1"}
        published = world.publish(trained(small(), "conv.weight"))
        assert island.export(models=["digits"], version="2", base="1").stat().st_size < first
        assert take_in(island.file, island.store, clock=world.clock).slabs_new == published.slabs_new
        assert agent.run_once(), agent.last_error
    assert island.installer.serving == {"digits": "2"}
    assert "full" not in world.events_of(SlabsFetched)[-1].bytes_by_form
    original = (world.folder / "bundle/full/model.safetensors").read_bytes()
    assert (world.folder / "node/models/digits/2/full/model.safetensors").read_bytes() == original


def test_a_node_that_comes_late_gets_what_came_as_a_difference_in_full(island: Island) -> None:
    island.world.publish(small())
    island.export()
    island.take_in()
    island.world.publish(trained(small()))
    island.export(models=["digits"], base="1")
    island.take_in()
    assert content(island.store) == content(island.world.store)
    with running(ServiceConfig(store=str(island.store.root))) as address, island.agent(address) as agent:
        assert agent.run_once(), agent.last_error
    assert island.installer.serving == {"digits": "2"}


def test_a_release_that_was_collected_before_the_next_export_does_not_stand_in_the_way(island: Island) -> None:
    world = island.world
    for number in range(4):
        world.publish(small(number))
        if number == 0:
            island.export()
            island.take_in()
    collect(world.store, keep=2, clock=world.clock)
    world.publish(small(9))
    island.export()
    assert island.take_in().releases == {"digits": "5"}
    with running(ServiceConfig(store=str(island.store.root))) as address, island.agent(address) as agent:
        assert agent.run_once(), agent.last_error
    assert island.installer.serving == {"digits": "5"}


def test_the_same_file_twice_changes_nothing(island: Island) -> None:
    island.world.publish(small())
    island.export()
    island.take_in()
    before = files(island.store)
    assert island.take_in().slabs_new == 0
    assert files(island.store) == before


def test_the_same_content_gives_the_same_file(island: Island) -> None:
    island.world.publish(small())
    first = island.export().read_bytes()
    assert island.export().read_bytes() == first


def test_one_model_of_several_travels_and_what_is_not_here_is_said(island: Island) -> None:
    island.world.publish(small(), model="digits")
    island.world.publish(small(7), model="cats")
    island.export(models=["cats"])
    done = island.take_in()
    assert done.releases == {"cats": "1"}
    assert done.not_here == ("digits/1",)
    with (
        running(ServiceConfig(store=str(island.store.root))) as address,
        island.agent(address, models=("cats",)) as agent,
    ):
        assert agent.run_once(), agent.last_error
    assert island.installer.serving == {"cats": "1"}
    island.export()
    assert island.take_in().not_here == ()


def test_what_was_carried_expires_as_it_was_signed(island: Island) -> None:
    island.world.publish(small())
    island.export()
    done = island.take_in()
    assert done.expires["timestamp"] == min(done.expires.values())
    assert 2.9 < (done.expires["timestamp"] - island.world.clock.wall).total_seconds() / 86_400 < 3.1
    island.world.clock.advance(days=4)
    with pytest.raises(TransferRefused, match="expired"):
        island.take_in(store=Store(island.folder / "other"))
    with pytest.raises(MetadataExpired):
        island.export()


def test_a_damaged_object_of_the_store_is_mended_by_what_comes(island: Island) -> None:
    island.world.publish(small())
    island.export()
    island.take_in()
    before = files(island.store)
    name = next(name for name in before if name.startswith("objects/"))
    (island.store.root / name).write_bytes(b"damaged")
    island.take_in()
    assert files(island.store) == before


# --- refusals ---


def rewritten(file: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """The same archive with other contents; None leaves an entry out."""
    target = file.with_name("rewritten.zip")
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(target, "w") as new:
        for one in old.infolist():
            data = change(one.filename, old.read(one))
            if data is not None:
                new.writestr(one.filename, data)
    return target


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Island:
    """An island with release 1, to which a file leads to release 2."""
    folder = tmp_path_factory.mktemp("template")
    world = World(folder)
    island = Island(world, folder)
    world.publish(small())
    island.export()
    island.take_in()
    world.publish(trained(small()))
    island.export(models=["digits"], base="1")
    return island


@pytest.fixture
def prepared(template: Island, tmp_path: Path) -> Island:
    shutil.copytree(template.store.root, tmp_path / "island")
    shutil.copyfile(template.file, tmp_path / "carried.zip")
    return Island(template.world, tmp_path)


@pytest.mark.parametrize("kind", ["/timestamp", ".snapshot.", ".targets.", "targets/desired", "targets/releases"])
def test_a_signed_file_that_is_changed_or_missing_is_refused_and_named(prepared: Island, kind: str) -> None:
    before = files(prepared.store)
    for change in (flipped, lambda data: None):
        file = rewritten(prepared.file, lambda name, data, change=change: change(data) if kind in name else data)  # type: ignore[misc]
        with pytest.raises(TransferRefused, match=r"rewritten\.zip is not imported: .*(digits|metadata|timestamp)"):
            prepared.take_in(file)
        assert signed(prepared.store) == signed_of(before)


@pytest.mark.parametrize("kind", [".pack", ".index"])
def test_a_pack_that_is_changed_or_missing_is_refused(prepared: Island, kind: str) -> None:
    before = files(prepared.store)
    for change in (flipped, lambda data: None, lambda data: data + b"x"):
        file = rewritten(prepared.file, lambda name, data, change=change: change(data) if kind in name else data)  # type: ignore[misc]
        with pytest.raises(TransferRefused, match="pack"):
            prepared.take_in(file)
        assert signed(prepared.store) == signed_of(before)
    assert prepared.take_in().releases == {"digits": "2"}


def test_a_slab_that_is_changed_or_missing_is_refused_and_named(island: Island) -> None:
    island.world.publish(small())
    island.export()
    with zipfile.ZipFile(island.file) as archive:
        victim = next(name for name in archive.namelist() if name.startswith("objects/"))
    slab = victim.rpartition("/")[2].removesuffix(".full")
    for change in (flipped, lambda data: None):
        file = rewritten(island.file, lambda name, data, change=change: change(data) if name == victim else data)  # type: ignore[misc]
        with pytest.raises(TransferRefused, match=f"slab {slab}"):
            island.take_in(file)
        assert signed(island.store) == {}


def content(store: Store) -> dict[str, bytes]:
    return {name: data for name, data in files(store).items() if name.startswith(("objects/", "packs/"))}


def signed(store: Store) -> dict[str, bytes]:
    return signed_of(files(store))


def signed_of(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in found.items() if name.startswith(("metadata/", "targets/"))}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_file_that_was_cut_off_is_refused(prepared: Island, share: float) -> None:
    data = prepared.file.read_bytes()
    prepared.file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(TransferRefused, match="cut off"):
        prepared.take_in()


def test_a_bit_that_flipped_on_the_way_is_found_or_means_nothing(prepared: Island) -> None:
    data, before = prepared.file.read_bytes(), signed(prepared.store)
    for at in range(0, len(data), len(data) // 17):
        prepared.file.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        try:
            prepared.take_in()
        except TransferRefused:
            assert signed(prepared.store) == before
        else:  # a bit that means nothing in a zip
            assert content(prepared.store) == content(prepared.world.store)
            before = signed(prepared.store)


def test_an_older_state_is_refused(island: Island) -> None:
    island.world.publish(small())
    old = shutil.copyfile(island.export(), island.folder / "old.zip")
    island.world.publish(trained(small()))
    island.export()
    island.take_in()
    with pytest.raises(TransferRefused, match="rollback attack refused"):
        island.take_in(old)
    with pytest.raises(TransferRefused, match="rollback attack refused"):
        take_in(old, island.store, clock=island.world.clock)


def test_a_state_that_was_only_signed_again_since_is_older_too(island: Island) -> None:
    island.world.publish(small())
    old = shutil.copyfile(island.export(), island.folder / "old.zip")
    island.world.clock.advance(days=1.5)
    assert Repository(island.world.store, island.world.keys, clock=island.world.clock).renew()
    island.export()
    island.take_in()
    with pytest.raises(TransferRefused, match=r"rollback attack refused: (timestamp|snapshot)"):
        island.take_in(old)


def test_two_states_of_one_version_do_not_follow_one_another(island: Island) -> None:
    """As when a backup of a publisher's store goes on beside it."""
    world = island.world
    world.publish(small())
    restored = Store(island.folder / "restored")
    shutil.copytree(world.store.root, restored.root)
    for store in (world.store, restored):
        world.clock.advance(days=1.5)
        assert Repository(store, world.keys, clock=world.clock).renew()
    island.export()
    island.take_in()
    export(restored, island.file, clock=world.clock)
    with pytest.raises(TransferRefused, match="mix-and-match attack refused: metadata/"):
        island.take_in()


def test_another_publishers_file_is_refused_and_a_store_without_a_root_asks_for_one(
    island: Island, tmp_path: Path
) -> None:
    island.world.publish(small())
    island.export()
    with pytest.raises(TransferRefused, match="--root"):
        take_in(island.file, island.store, clock=island.world.clock)
    island.take_in()
    (tmp_path / "stranger").mkdir()
    stranger = World(tmp_path / "stranger", FakeClock())
    stranger.publish(small())
    export(stranger.store, tmp_path / "theirs.zip", clock=stranger.clock)
    for root in (None, stranger.root.read_bytes()):
        with pytest.raises(TransferRefused, match="root"):
            take_in(tmp_path / "theirs.zip", island.store, root=root, clock=stranger.clock)


def test_a_difference_to_what_the_store_does_not_have_is_refused(prepared: Island) -> None:
    empty = Store(prepared.folder / "empty")
    with pytest.raises(TransferRefused, match="export it without --base"):
        prepared.take_in(store=empty)
    assert empty.read(TIMESTAMP) is None


@pytest.mark.parametrize("name", ["../outside", "objects/../../outside", "/etc/outside", "lock", "objects/ab/x.full"])
def test_a_name_that_has_no_place_in_a_store_is_refused(prepared: Island, name: str) -> None:
    with zipfile.ZipFile(prepared.file, "a") as archive:
        archive.writestr(name, b"hostile")
    with pytest.raises(TransferRefused, match=r"outside|lock|x\.full"):
        prepared.take_in()
    assert not list(prepared.folder.rglob("outside"))


def test_entries_that_are_compressed_or_twice_there_are_refused(prepared: Island) -> None:
    with zipfile.ZipFile(prepared.file, "a") as archive:
        archive.writestr("objects/ab/bomb.full", bytes(1 << 20), zipfile.ZIP_DEFLATED)
    with pytest.raises(TransferRefused, match="compressed"):
        prepared.take_in()
    prepared.export()
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(prepared.file, "a") as archive:
        archive.writestr(TIMESTAMP, b"{}")
    with pytest.raises(TransferRefused, match="twice"):
        prepared.take_in()


def test_a_store_that_somebody_writes_to_is_left_alone(prepared: Island) -> None:
    with prepared.store.lock(), pytest.raises(StoreBusy):
        take_in(prepared.file, prepared.store, clock=prepared.world.clock, wait_s=0.0)


# --- what is asked for ---


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"models": ["dogs"]}, "'dogs' is not released"),
        ({"models": ["digits"], "version": "1"}, "digits/1 is not what nodes should serve"),
        ({"models": ["digits"], "base": "7"}, "digits/7 is not in this store"),
        ({"version": "2"}, "exactly one --model"),
    ],
)
def test_a_wrong_choice_is_told_before_anything_is_written(
    prepared: Island, options: dict[str, Any], problem: str
) -> None:
    prepared.file.unlink()
    with pytest.raises(ConfigError, match=problem):
        prepared.export(**options)
    assert not prepared.file.exists()
