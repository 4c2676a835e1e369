from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from common.errors import BundleError, StoreBusy
from sync.manifests import packed_name, unpack
from sync.packs import Entry, is_sound, parse_index
from sync.store import Store, pack_name
from tests.sync.fakes import World, make_bundle, trained, weights


def test_identical_content_is_published_once(world: World) -> None:
    first = world.publish(weights())
    timestamp = world.store.read("metadata/timestamp.json")
    again = world.publish(weights())
    assert (first.is_new, again.is_new) == (True, False)
    assert (again.version, again.epoch, again.digest) == ("1", 1, first.digest)
    assert world.store.read("metadata/timestamp.json") == timestamp


def test_forcing_gives_identical_content_a_new_version_and_epoch(world: World) -> None:
    first = world.publish(weights())
    forced = world.publish(weights(), force=True)
    assert (forced.version, forced.epoch, forced.slabs_new, forced.bytes_delta) == ("2", 2, 0, 0)
    assert forced.digest == first.digest


def test_unchanged_slabs_are_not_stored_again(world: World) -> None:
    world.publish(weights())
    before = {path.name for path in world.store.root.glob("objects/*/*.full")}
    published = world.publish(trained(weights(), "fc.weight"))
    new = {path.name for path in world.store.root.glob("objects/*/*.full")} - before
    assert published.slabs_new == len(new) > 0
    assert published.bytes_delta < published.bytes_full / 2


def test_a_difference_is_packed_only_where_it_is_smaller(world: World) -> None:
    world.publish(weights(0))
    world.publish(weights(1))  # unrelated weights: a difference has more entropy than the thing itself
    for entry in entries(world, "2", "1"):
        assert entry.header.payload_length < (world.store.full_bytes(entry.header.slab) or 0)


def test_there_are_packs_to_the_last_two_releases(world: World) -> None:
    """A node that refused version 2 gets version 3 as a difference to version 1."""
    one = weights()
    two = trained(one, "fc.weight", seed=1)
    three = trained(two, "fc.weight", seed=2)
    for version in (one, two, three):
        world.publish(version)
    ids = [ids_of(world, version) for version in ("1", "2", "3")]
    changed = ids[2] - ids[1]
    for base in (1, 2):
        packed = {entry.header.slab: entry.header.base for entry in entries(world, "3", str(base))}
        assert changed <= set(packed)
        assert {packed[slab] for slab in changed} <= ids[base - 1] - ids[2]
    assert len(list(world.store.root.glob("packs/*/*.index"))) == 3


def test_releasing_the_same_again_does_not_use_up_a_base(world: World) -> None:
    one = weights()
    two = trained(one, "fc.weight", seed=1)
    world.publish(one)
    world.publish(two)
    world.publish(two, force=True)
    world.publish(trained(two, "fc.weight", seed=2))
    assert entries(world, "4", "3")
    assert entries(world, "4", "1")


def test_what_a_push_costs_is_what_there_is_to_fetch(world: World) -> None:
    first = world.publish(weights())
    second = world.publish(trained(weights(), "fc.weight"))
    assert first.bytes_by_form == {"full": first.bytes_delta} == {"full": first.bytes_full}
    manifests = [world.publisher.manifest("digits", version) for version in "12"]
    assert manifests[0] is not None
    assert manifests[1] is not None
    target, base = (one.digest() for one in reversed(manifests) if one is not None)
    index = world.store.index(target, base) or b""
    assert second.bytes_by_form["index"] == len(index)
    assert second.bytes_delta == sum(second.bytes_by_form.values())
    new = set(manifests[1].slabs()) - set(manifests[0].slabs())
    smallest = {slab: world.store.full_bytes(slab) or 0 for slab in new}
    for entry in entries(world, "2", "1"):
        smallest[entry.header.slab] = min(smallest[entry.header.slab], entry.header.payload_length)
    payloads = {form: count for form, count in second.bytes_by_form.items() if form not in ("index", "tables")}
    assert sum(payloads.values()) == sum(smallest.values())
    assert packed_manifests(world, "2") == {"whole": packed_manifests(world, "2")["whole"], "1": second.bytes_manifest}
    assert second.bytes_manifest < packed_manifests(world, "2")["whole"] < stored_manifest(world, "2").stat().st_size


def stored_manifest(world: World, version: str) -> Path:
    (path,) = world.store.root.glob(f"targets/releases/digits/*.{version}.json")
    return path


def packed_manifests(world: World, version: str) -> dict[str, int]:
    """How many bytes a manifest has as it travels, by the version that the reader has; all of them give it."""
    signed, sizes = stored_manifest(world, version).read_bytes(), {}
    bases = {"whole": b""} | {str(one): stored_manifest(world, str(one)).read_bytes() for one in range(1, int(version))}
    for name, base in bases.items():
        packed = world.store.read(packed_name(str(stored_manifest(world, version).relative_to(world.store.root)), base))
        if packed is not None:
            assert unpack(packed, base) == signed
            sizes[name] = len(packed)
    return sizes


def entries(world: World, target: str, base: str) -> tuple[Entry, ...]:
    """What the pack between two versions of `digits` has."""
    manifests = [world.publisher.manifest("digits", version) for version in (target, base)]
    new, old = (one for one in manifests if one is not None)
    digests = (new.digest(), old.digest())
    index = parse_index(world.store.index(*digests) or b"", base=old, target=new)
    assert index is not None
    with (world.store.root / pack_name(*digests)).open("rb") as file:
        assert is_sound(index, file)
    return index.entries


def ids_of(world: World, version: str) -> set[str]:
    manifest = world.publisher.manifest("digits", version)
    assert manifest is not None
    return {slab.id for file in manifest.files if file.path.startswith("full/") for slab in file.slabs}


def test_only_what_the_bundle_ships_is_released(world: World) -> None:
    world.publish(weights())
    manifest = world.publisher.manifest("digits", "1")
    assert manifest is not None
    assert {file.path for file in manifest.files} == {
        "bundle.json",
        "golden.safetensors",
        "labels.txt",
        "cpu-int8/model.safetensors",
        "full/model.safetensors",
    }
    tensors = {t.name: t for file in manifest.files if file.path.startswith("full/") for t in file.tensors}
    assert tensors["conv.weight"].shape == (64, 128)
    assert all(tensor.slabs for tensor in tensors.values())


def test_a_damaged_base_in_the_store_costs_the_difference_only(world: World) -> None:
    world.publish(weights())
    for path in world.store.root.glob("objects/*/*.full"):
        path.write_bytes(path.read_bytes()[:-1])
    published = world.publish(trained(weights(), "fc.weight"))
    assert published.is_new
    assert not list(world.store.root.glob("packs/*/*.index"))


def test_an_incomplete_bundle_is_refused(world: World) -> None:
    folder = make_bundle(world.folder / "bundle", "digits", weights())
    (folder / "labels.txt").unlink()
    with pytest.raises(BundleError, match=r"labels\.txt"):
        world.publisher.publish(folder)


def test_publishers_take_turns(world: World) -> None:
    folders = [make_bundle(world.folder / f"b{i}", "digits", weights(i)) for i in range(4)]
    threads = [threading.Thread(target=world.publisher.publish, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    current = world.publisher.current("digits")
    assert current is not None
    assert (current.version, current.epoch) == ("4", 4)


def test_a_busy_store_is_given_up_after_the_wait(world: World) -> None:
    folder = make_bundle(world.folder / "bundle", "digits", weights())
    with world.store.lock(), pytest.raises(StoreBusy):
        world.publisher.publish(folder, wait_s=0.05)


def test_models_have_their_own_versions(world: World) -> None:
    world.publish(weights(0), model="a")
    world.publish(weights(1), model="a")
    assert world.publish(weights(2), model="b").version == "1"


def test_large_tensors_are_cut(world: World) -> None:
    big = {"w": weights(rows=4096)["fc.weight"]}
    world.publish(big)
    manifest = world.publisher.manifest("digits", "1")
    assert manifest is not None
    (full,) = [file for file in manifest.files if file.path.startswith("full/")]
    (tensor,) = full.tensors
    assert len(tensor.slabs) == 4096 * 256 * 4 >> 20
    assert full.size == os.stat(world.folder / "bundle/full/model.safetensors").st_size


def test_forcing_mends_a_damaged_object_in_the_store(world: World) -> None:
    world.publish(weights())
    path = max((world.store.root / "objects").rglob("*.full"), key=lambda one: one.stat().st_size)
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    world.publish(weights(), force=True)
    assert path.read_bytes() == sound


@pytest.mark.parametrize("suffix", ["pack", "index"])
def test_forcing_mends_a_damaged_pack(world: World, suffix: str) -> None:
    world.publish(weights())
    world.publish(trained(weights(), "fc.weight"))
    (path,) = world.store.root.glob(f"packs/*/*.{suffix}")
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    world.publish(trained(weights(), "fc.weight"), force=True)
    assert path.read_bytes() == sound


def test_a_pack_that_is_there_is_not_written_again(world: World) -> None:
    world.publish(weights())
    world.publish(trained(weights(), "fc.weight"))
    paths = {path: path.stat().st_mtime_ns for path in world.store.root.glob("packs/*/*")}
    world.publish(trained(weights(), "fc.weight"), force=True)
    assert {path: path.stat().st_mtime_ns for path in world.store.root.glob("packs/*/*")} == paths


def test_a_crash_while_packing_leaves_nothing_that_is_used(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish(weights())

    def die(self: Store, target: str, base: str, data: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_index", die)
        with pytest.raises(KeyboardInterrupt):
            world.publish(trained(weights(), "fc.weight"))
    current = world.publisher.current("digits")
    assert current is not None
    assert current.version == "1"
    world.publish(trained(weights(), "fc.weight"))
    assert entries(world, "2", "1")
