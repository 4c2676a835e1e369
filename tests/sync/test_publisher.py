from __future__ import annotations

import os
import threading

import pytest

from common.errors import BundleError, StoreBusy
from sync import codec
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


def test_a_delta_is_kept_only_where_it_is_smaller(world: World) -> None:
    world.publish(weights(0))
    world.publish(weights(1))  # unrelated weights: a difference has more entropy than the thing itself
    for path in world.store.root.glob("objects/*/*.delta.*"):
        slab, _, base = path.name.split(".")
        assert path.stat().st_size < (world.store.full_bytes(slab) or 0)
        assert codec.read_header(path.read_bytes(), slab).base == base


def test_there_are_deltas_to_the_last_two_releases(world: World) -> None:
    """A node that refused version 2 gets version 3 as a difference to version 1."""
    one = weights()
    two = trained(one, "fc.weight", seed=1)
    three = trained(two, "fc.weight", seed=2)
    for version in (one, two, three):
        world.publish(version)
    ids = [ids_of(world, version) for version in ("1", "2", "3")]
    changed = ids[2] - ids[1]
    for slab in changed:
        bases = {path.name.split(".")[2] for path in world.store.root.glob(f"objects/*/{slab}.delta.*")}
        assert bases & ids[0]
        assert bases & ids[1]


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


def test_a_damaged_base_in_the_store_costs_the_delta_only(world: World) -> None:
    world.publish(weights())
    for path in world.store.root.glob("objects/*/*.full"):
        path.write_bytes(path.read_bytes()[:-1])
    published = world.publish(trained(weights(), "fc.weight"))
    assert published.is_new
    assert not list(world.store.root.glob("objects/*/*.delta.*"))


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
