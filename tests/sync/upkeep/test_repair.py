"""`verify` on damaged stores: what it finds, what it heals, and what a node makes of the damage meanwhile."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tuf.api.metadata import Metadata, MetaFile, Snapshot, Targets, Timestamp

from common.errors import OutriderError
from sync.codec import CTX
from sync.manifests import packed_name, unpack
from sync.packs import parse_index
from sync.publisher import Publisher
from sync.store import Store, index_name, object_name
from sync.trust.repository import Repository
from sync.upkeep.collect import collect
from sync.upkeep.repair import Report, verify
from tests.sync.fakes import FakeInstaller, StoreSource, World, make_bundle, trained, weights

ONE = weights(rows=16)
TWO = trained(ONE, "fc.weight", seed=1)
THREE = trained(TWO, "fc.weight", seed=2)
KINDS = {
    "timestamp": "metadata/timestamp.json",
    "root": "metadata/1.root.json",
    "metadata": "metadata/[0-9]*.[dst]*.json",
    "desired": "targets/desired/*",
    "manifest": "targets/releases/digits/*.json",
    "side": "targets/releases/digits/*.zst",
    "object": "objects/*/*.full",
    "index": "packs/*/*.index",
    "pack": "packs/*/*.pack",
}
FLIPS = 4


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Three releases; nobody writes to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: None)
        world = World(tmp_path_factory.mktemp("template"))
        for content in (ONE, TWO, THREE):
            world.publish(content)
    return world


@pytest.fixture
def damaged(template: World, tmp_path: Path) -> World:
    """A copy, to be damaged."""
    world = copy.copy(template)
    world.folder = tmp_path
    world.store = Store(Path(shutil.copytree(template.store.root, tmp_path / "store")))
    world.source, world.events = StoreSource(world.store), []
    world.publisher = Publisher(world.store, template.keys, clock=world.clock)
    return world


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def content(store: Store) -> dict[str, bytes]:
    return {one.name: (store.root / one.name).read_bytes() for one in store.files() if one.name != "lock"}


def wrong(report: Report) -> set[str]:
    return {one.name for one in report.findings if one.is_wrong}


def new_objects(world: World, version: str, before: str) -> list[Path]:
    """Of slabs of the large tensors that a release has and another does not."""
    new, old = (world.publisher.manifest("digits", one) for one in (version, before))
    assert new is not None
    assert old is not None
    return [world.store.root / object_name(slab) for slab in new.slabs().keys() - old.slabs().keys()]


# --- finding ---


def test_a_sound_store_is_good_and_everything_in_it_is_looked_at(template: World) -> None:
    report = verify(template.store, clock=template.clock)
    assert (report.is_good, report.findings) == (True, ())
    looked = sum(sum(states.values()) for states in report.counts.values())
    assert looked == len(content(template.store))


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_is_found_and_never_served(damaged: World, installer: FakeInstaller, kind: str) -> None:
    """The positions are drawn anew in each run. A zstd frame has bits that say nothing: then what it gives is right."""
    draw = random.Random()
    for number in range(FLIPS):
        path = draw.choice(sorted(damaged.store.root.glob(KINDS[kind])))
        bit = draw.randrange(8 * path.stat().st_size)
        flip(path, bit)
        name = str(path.relative_to(damaged.store.root))
        found = wrong(verify(damaged.store, clock=damaged.clock))
        assert name in found or (kind == "side" and gives_the_manifest(path)), (name, bit)
        if number == 0:
            assert_only_right_bytes_are_served(damaged, installer)
        flip(path, bit)
    assert verify(damaged.store, clock=damaged.clock).is_good


@pytest.mark.parametrize("kind", ["side", "object", "index", "pack"])
def test_a_file_that_is_too_long_is_found(damaged: World, kind: str) -> None:
    path = sorted(damaged.store.root.glob(KINDS[kind]))[0]
    path.write_bytes(path.read_bytes() + b"x")
    assert wrong(verify(damaged.store)) == {str(path.relative_to(damaged.store.root))}


@pytest.mark.parametrize("name", ["metadata/timestamp.json", "metadata/1.root.json"])
def test_a_signature_that_only_changed_its_spelling_is_found(damaged: World, name: str) -> None:
    path = damaged.store.root / name
    signature = json.loads(path.read_bytes())["signatures"][0]["sig"]
    path.write_bytes(path.read_bytes().replace(signature.encode(), signature.upper().encode()))
    assert name in wrong(verify(damaged.store, clock=damaged.clock))


def gives_the_manifest(path: Path) -> bool:
    folder, name = path.parent, path.name.partition(".json")[0] + ".json"
    bases = [b"", *(one.read_bytes() for one in folder.glob("*.json"))]
    (base,) = (one for one in bases if packed_name(name, one) == path.name)
    return unpack(path.read_bytes(), base) == (folder / name).read_bytes()


def assert_only_right_bytes_are_served(world: World, installer: FakeInstaller) -> None:
    bundle = make_bundle(world.folder / "bundle", "digits", THREE)
    with world.agent(installer) as agent:
        agent.run_once()
    arrived = world.folder / "node/models/digits/3"
    assert arrived.exists() == (installer.serving == {"digits": "3"})
    for path in arrived.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (bundle / path.relative_to(arrived)).read_bytes()


@pytest.mark.parametrize("kind", ["timestamp", "root", "metadata", "desired", "object", "pack"])
def test_what_is_gone_is_missing(damaged: World, kind: str) -> None:
    for path in damaged.store.root.glob(KINDS[kind]):
        path.unlink()
    report = verify(damaged.store, clock=damaged.clock)
    assert {one.state for one in report.findings} == {"missing"}


def test_expired_signatures_are_told(damaged: World) -> None:
    damaged.clock.advance(days=4)
    try:
        report = verify(damaged.store, clock=damaged.clock)
    finally:
        damaged.clock.advance(days=-4)
    assert {(one.name, one.state) for one in report.findings} == {("metadata/timestamp.json", "expired")}
    assert not report.is_good


def test_what_is_collected_while_it_looks_is_no_damage(damaged: World) -> None:
    class Collecting(Store):
        is_done = False

        def full(self, slab: str) -> bytes | None:
            if not self.is_done:
                self.is_done = True
                collect(damaged.store, keep=2)
            return super().full(slab)

    store = Collecting(damaged.store.root)
    report = verify(store, clock=damaged.clock)
    assert store.is_done
    assert (report.is_good, report.findings) == (True, ())


# --- healing ---


def heals(world: World, damage: Callable[[Path], None], *paths: Path) -> Report:
    """Damages files; they have to come back as they were."""
    before = content(world.store)
    for path in paths:
        damage(path)
    assert {str(path.relative_to(world.store.root)) for path in paths} <= wrong(verify(world.store, clock=world.clock))
    report = verify(world.store, repair=True, clock=world.clock)
    assert report.is_good
    assert content(world.store) == before
    return report


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [halve, Path.unlink], ids=["damaged", "missing"])
def test_an_object_comes_back_through_a_difference(damaged: World, damage: Callable[[Path], None]) -> None:
    heals(damaged, damage, *new_objects(damaged, "3", "2"))


def test_an_object_comes_back_through_one_that_came_back(damaged: World) -> None:
    """Release 2 from release 1, and where the way from 1 to 3 is damaged too, release 3 from release 2."""
    digests = [manifest.digest() for one in "31" if (manifest := damaged.publisher.manifest("digits", one))]
    pack = damaged.store.root / f"packs/{digests[0]}/{digests[1]}.pack"
    heals(damaged, halve, pack, *new_objects(damaged, "2", "1"), *new_objects(damaged, "3", "2"))


def test_objects_come_back_in_whatever_order_they_lead_to_each_other(damaged: World) -> None:
    """The first release, which is released again, from the third; and that from the second."""
    Publisher(damaged.store, damaged.keys, bases=1, clock=damaged.clock).publish(
        make_bundle(damaged.folder / "bundle", "digits", ONE)
    )
    heals(damaged, halve, *new_objects(damaged, "1", "3"), *new_objects(damaged, "3", "2"))


@pytest.mark.parametrize("kind", ["index", "pack"])
def test_packs_are_made_anew_from_the_objects_at_their_ends(damaged: World, kind: str) -> None:
    report = heals(damaged, halve, *damaged.store.root.glob(KINDS[kind]))
    assert {one.outcome for one in report.findings} == {"made anew"}


def test_a_pack_made_anew_has_the_rows_of_the_tensors(world: World) -> None:
    """Which only the `ctx` form needs: here 512 words, as the shape says."""
    first = {"wide.weight": weights(rows=256)["conv.weight"].reshape(64, 512)}
    for one in (first, trained(first)):
        world.publish(one)
    two, base = (world.publisher.manifest("digits", version) for version in "21")
    assert two is not None
    assert base is not None
    index = parse_index(world.store.index(two.digest(), base.digest()) or b"", base=base, target=two)
    assert index is not None
    assert {entry.header.row for entry in index.entries if entry.header.form == CTX} == {512}
    heals(world, halve, *world.store.root.glob(KINDS["index"]))


def test_the_ways_to_a_manifest_are_made_anew(damaged: World) -> None:
    heals(damaged, halve, *damaged.store.root.glob(KINDS["side"]))


def test_an_object_that_nothing_leads_to_is_removed_and_the_next_publish_writes_it(damaged: World) -> None:
    bad = max(new_objects(damaged, "1", "2"), key=lambda path: path.stat().st_size)
    sound = bad.read_bytes()
    halve(bad)
    report = verify(damaged.store, repair=True, clock=damaged.clock)
    (finding,) = (one for one in report.findings if one.is_wrong)
    assert (finding.name, bad.exists(), report.is_good) == (object_name(bad.stem), False, False)
    assert finding.outcome.startswith("removed: a backup has it")
    damaged.publish(ONE)
    assert bad.read_bytes() == sound
    assert verify(damaged.store, clock=damaged.clock).is_good


@pytest.mark.parametrize("kind", ["timestamp", "root", "desired", "manifest"])
def test_signed_files_are_never_touched_and_the_backup_is_named(damaged: World, kind: str) -> None:
    paths = sorted(damaged.store.root.glob(KINDS[kind]))
    for path in paths:
        halve(path)
    before = content(damaged.store)
    report = verify(damaged.store, repair=True, clock=damaged.clock)
    assert content(damaged.store) == before
    live = [one for one in report.findings if one.is_needed]
    assert live
    assert all("from a backup" in one.outcome for one in live)


def test_nothing_is_removed_while_nobody_can_say_what_is_needed(damaged: World) -> None:
    for kind in ("timestamp", "object", "pack"):
        for path in damaged.store.root.glob(KINDS[kind]):
            halve(path)
    before = content(damaged.store)
    assert not verify(damaged.store, repair=True, clock=damaged.clock).is_good
    assert content(damaged.store) == before


# --- cut off ---


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("cause", [FULL, KeyboardInterrupt()], ids=["disk full", "Ctrl-C"])
def test_a_repair_may_be_cut_off_at_any_write_and_be_run_again(
    damaged: World, monkeypatch: pytest.MonkeyPatch, cause: BaseException
) -> None:
    sound = content(damaged.store)
    two, one = (damaged.publisher.manifest("digits", version) for version in "21")
    assert two is not None
    assert one is not None
    victims = [*new_objects(damaged, "3", "2"), damaged.store.root / index_name(two.digest(), one.digest())]
    victims += sorted(damaged.store.root.glob(KINDS["side"]))[:2]
    for number in range(1, 20, 2):
        for path in victims:
            halve(path)
        if not fails_at(number, cause, monkeypatch, lambda: verify(damaged.store, repair=True, clock=damaged.clock)):
            break
        assert not [one for one in damaged.store.files() if one.is_temporary]
        assert wrong(verify(damaged.store, clock=damaged.clock)) <= {
            str(path.relative_to(damaged.store.root)) for path in victims
        }
    assert number > 5
    assert content(damaged.store) == sound


def fails_at(number: int, cause: BaseException, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> bool:
    """Runs `work` with its fsync `number` failing so; False when it ends before that."""
    left = [number]

    def fsync(fd: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise type(cause)(*cause.args)

    caught: list[BaseException] = []
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fsync)
        try:
            work()
        except type(cause) as exc:
            caught.append(exc)
    assert bool(caught) == (left[0] <= 0)
    assert all(getattr(exc, "filename", "") is not None for exc in caught)  # which file it was
    return bool(caught)


def test_a_publish_may_find_the_disk_full_at_any_write(damaged: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was published is served, nothing is half there, and the next publish is whole."""
    folder = make_bundle(damaged.folder / "bundle", "digits", trained(THREE, "fc.weight", seed=3))
    for number in range(1, 40, 3):
        before = damaged.store.read("metadata/timestamp.json")
        if not fails_at(number, FULL, monkeypatch, lambda: damaged.publisher.publish(folder)):
            break
        assert not [one for one in damaged.store.files() if one.is_temporary]
        current = damaged.publisher.current("digits")
        assert current is not None
        assert (current.version == "3") == (damaged.store.read("metadata/timestamp.json") == before)
        assert verify(damaged.store, clock=damaged.clock).is_good
        if current.version != "3":
            break
    assert number > 9
    assert damaged.publisher.publish(folder).version == "4"
    assert verify(damaged.store, clock=damaged.clock).is_good


def test_a_write_that_the_system_refuses_names_the_file(damaged: World) -> None:
    """For real: no file may grow over 4 KiB."""
    folder = make_bundle(damaged.folder / "bundle", "digits", trained(THREE, "fc.weight", seed=3))
    before = content(damaged.store)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OSError, match=r"objects/..") as caught:
            damaged.publisher.publish(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.errno == errno.EFBIG
    assert before.items() <= content(damaged.store).items()
    assert verify(damaged.store, clock=damaged.clock).is_good


# --- chains of keys ---


def test_metadata_that_nobody_is_trusted_to_sign_is_damage(damaged: World) -> None:
    other = World(damaged.folder / "other", damaged.clock)
    for name in ("metadata/timestamp.json", "metadata/1.root.json"):
        sound = (damaged.store.root / name).read_bytes()
        shutil.copyfile(other.store.root / name, damaged.store.root / name)
        assert wrong(verify(damaged.store, clock=damaged.clock)) == {"metadata/timestamp.json"}
        (damaged.store.root / name).write_bytes(sound)


def test_a_role_that_is_signed_with_another_key_is_damage_though_the_snapshot_lists_it(damaged: World) -> None:
    """Whoever has the online keys alone cannot sign releases."""
    other, root = World(damaged.folder / "other", damaged.clock), damaged.store.root / "metadata"
    timestamp = Metadata[Timestamp].from_file(str(root / "timestamp.json"))
    snapshot = Metadata[Snapshot].from_file(str(root / f"{timestamp.signed.snapshot_meta.version}.snapshot.json"))
    name = f"{snapshot.signed.meta['targets.json'].version}.targets.json"
    targets = Metadata[Targets].from_file(str(root / name))
    (root / name).write_bytes(signed(targets, other.keys.signer("targets")))
    snapshot.signed.meta["targets.json"] = MetaFile.from_data(targets.signed.version, targets.to_bytes(), ["sha256"])
    data = signed(snapshot, damaged.keys.signer("snapshot"))
    (root / f"{snapshot.signed.version}.snapshot.json").write_bytes(data)
    timestamp.signed.snapshot_meta = MetaFile.from_data(snapshot.signed.version, data, ["sha256"])
    (root / "timestamp.json").write_bytes(signed(timestamp, damaged.keys.signer("timestamp")))
    report = verify(damaged.store, clock=damaged.clock)
    assert [(one.name, one.problem) for one in report.findings] == [
        (f"metadata/{name}", "is signed by 0 of the 1 keys that it needs")
    ]


def signed(metadata: Metadata[Any], signer: Any) -> bytes:
    metadata.sign(signer)
    return metadata.to_bytes()


def test_signing_again_does_not_make_the_old_signatures_damage(damaged: World) -> None:
    later = damaged.clock.now() + timedelta(days=40)
    damaged.clock.advance(days=40)
    try:
        assert Repository(damaged.store, damaged.keys, clock=damaged.clock).renew()
        assert damaged.clock.now() == later
        assert verify(damaged.store, clock=damaged.clock).is_good
    finally:
        damaged.clock.advance(days=-40)


def test_without_a_store_there_is_an_error_and_no_store(tmp_path: Path) -> None:
    report = verify(Store(tmp_path / "none"))
    assert {(one.name, one.state) for one in report.findings} == {("metadata/1.root.json", "missing")}
    with pytest.raises(OutriderError, match=r"1\.root\.json is missing"):
        collect(Store(tmp_path / "none"))
