"""The verifier against a repository, through a transport that lies; the attacks by name are in `test_attacks.py`. Also
the tests of `sync/trust/repository.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from blake3 import blake3

from common.errors import BadRelease, FetchError, MetadataExpired, TrustError
from sync.manifests import pack
from sync.release import Manifest
from sync.store import TIMESTAMP, Store
from sync.trust.keys import Keys
from sync.trust.repository import Lives, Repository
from sync.trust.verifier import Verifier
from tests.sync.fakes import FakeClock, StoreSource, World, weights


def verifier(world: World, name: str = "tuf") -> Verifier:
    return Verifier(world.folder / name, world.root.read_bytes(), world.source.read, world.clock)


def test_what_was_signed_is_believed(world: World) -> None:
    published = world.publish(weights())
    view = verifier(world).refresh()
    desired = view.desired("digits")
    assert view.models() == ("digits",)
    assert desired is not None
    assert (desired.version, desired.epoch, desired.digest) == ("1", 1, published.digest)
    assert view.manifest(desired).parent is None
    assert view.desired("other") is None


def test_a_reader_of_an_older_state_still_finds_what_it_was_promised(world: World) -> None:
    world.publish(weights(0))
    old = verifier(world).refresh()
    world.publish(weights(1))
    assert (desired := old.desired("digits")) is not None
    assert desired.version == "1"
    assert old.manifest(desired).version == "1"


@pytest.mark.parametrize("name", ["timestamp.json", ".snapshot.json", ".targets.json", ".desired.json"])
def test_changed_metadata_is_refused(world: World, name: str) -> None:
    world.publish(weights())
    world.source.tamper = lambda which, data: data.replace(b'"version":', b'"version":1') if name in which else data
    with pytest.raises(TrustError):
        verifier(world).refresh()


def test_a_tampered_manifest_is_refused(world: World) -> None:
    world.publish(weights())
    world.source.tamper = lambda name, data: data[:-1] + bytes([data[-1] ^ 1]) if "releases" in name else data
    view = verifier(world).refresh()
    desired = view.desired("digits")
    assert desired is not None
    with pytest.raises(TrustError):
        view.manifest(desired)


def manifest_at(one: Verifier) -> Manifest:
    """As the node asks for it now."""
    view = one.refresh()
    desired = view.desired("digits")
    assert desired is not None
    found = view.manifest(desired)
    view.prune()
    return found


@dataclass
class Reads:
    """What is read of manifests, and how many bytes; `tamper` changes some of it on its way."""

    source: StoreSource
    tamper: Callable[[str, bytes], bytes] = lambda name, data: data
    sizes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source.tamper = self._read

    def _read(self, name: str, data: bytes) -> bytes:
        if "/releases/" in name:
            data = self.tamper(name, data)
            self.sizes[name.partition(".")[2]] = len(data)
        return data


def packed_to(world: World, version: str) -> str:
    """How the name of a manifest ends that is packed against that of `version`."""
    (path,) = world.store.root.glob(f"targets/releases/digits/*.{version}.json")
    return f"{blake3(path.read_bytes()).hexdigest()[:16]}.zst"


def test_a_manifest_travels_as_a_difference_to_the_one_before(world: World) -> None:
    reads, one = Reads(world.source), verifier(world)
    world.publish(weights(0))
    assert manifest_at(one).version == "1"
    assert list(reads.sizes) == ["1.json.zst"]
    view = one.refresh()
    assert view.desired("digits") is not None
    view.prune()  # nothing new: nobody asks for the manifest, and it stays
    world.publish(weights(1))
    reads.sizes.clear()
    assert manifest_at(one) == world.publisher.manifest("digits", "2")
    assert list(reads.sizes) == [f"2.json.{packed_to(world, '1')}"]
    assert manifest_at(verifier(world, "new")).version == "2"
    assert reads.sizes[f"2.json.{packed_to(world, '1')}"] < 0.6 * reads.sizes["2.json.zst"]


def test_a_node_that_left_a_release_out_gets_a_difference_too(world: World) -> None:
    reads, one = Reads(world.source), verifier(world)
    for version in "1234":
        world.publish(weights(int(version)))
        if version == "2":
            manifest_at(one)
    reads.sizes.clear()
    assert manifest_at(one).version == "4"
    assert list(reads.sizes) == [f"4.json.{packed_to(world, '2')}"]


def test_the_base_stays_until_the_new_manifest_has_come(world: World) -> None:
    reads, one = Reads(world.source), verifier(world)
    world.publish(weights(0))
    manifest_at(one)
    world.publish(weights(1))
    view = one.refresh()
    assert view.desired("digits") is not None
    view.prune()  # the manifest itself could not be fetched
    reads.sizes.clear()
    manifest_at(one)
    assert list(reads.sizes) == [f"2.json.{packed_to(world, '1')}"]
    assert [path.name for path in (world.folder / "tuf/targets").glob("*releases*")] == ["releases%2Fdigits%2F2.json"]


@pytest.mark.parametrize(
    "tamper",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[:30],
        lambda data: b"",
        lambda data: pack(b"another manifest"),
        lambda data: pack(bytes(60 << 20)),
        lambda data: data + bytes(1 << 20),
    ],
)
def test_what_is_wrong_with_an_unsigned_way_costs_that_way_only(world: World, tamper: Callable[[bytes], bytes]) -> None:
    reads, one = Reads(world.source), verifier(world)
    world.publish(weights(0))
    manifest_at(one)
    world.publish(weights(1))
    reads.sizes.clear()
    reads.tamper = lambda name, data: tamper(data) if name.endswith(".zst") else data
    assert manifest_at(one) == world.publisher.manifest("digits", "2")
    assert list(reads.sizes) == [f"2.json.{packed_to(world, '1')}", "2.json.zst", "2.json"]


def test_a_store_without_packed_manifests_serves_the_signed_ones(world: World) -> None:
    world.publish(weights())
    for path in world.store.root.rglob("*.json.zst"):
        path.unlink()
    assert manifest_at(verifier(world)).version == "1"


def hostile_desired() -> bytes:
    fields = {"model": "digits", "epoch": 2, "version": "2", "digest": "aa" * 32, "manifest_hash": "bb" * 32}
    return json.dumps({**fields, "manifest": "releases/digits/2.json", "format": 1}).encode()


def test_desired_state_of_another_model_is_refused(world: World) -> None:
    Repository(world.store, world.keys).add({}, {"desired/photos.json": hostile_desired()})
    with pytest.raises(BadRelease):
        verifier(world).refresh().desired("photos")


def test_expired_metadata_is_refused_until_it_is_signed_again(world: World) -> None:
    world.publish(weights())
    one = verifier(world)
    one.refresh()
    world.clock.advance(days=4)
    with pytest.raises(MetadataExpired, match="freeze"):
        one.refresh()
    assert Repository(world.store, world.keys, clock=world.clock).renew()
    assert one.refresh().models() == ("digits",)


def test_online_roles_are_signed_again_after_a_third_of_their_life(world: World) -> None:
    repository = Repository(world.store, world.keys, clock=world.clock)
    assert not repository.renew()
    world.clock.advance(hours=23)
    assert not repository.renew()
    world.clock.advance(hours=2)
    assert repository.renew()
    assert not repository.renew()
    world.clock.advance(days=31)
    assert repository.renew()
    assert verifier(world).refresh().versions() == {
        "root": 1,
        "timestamp": 4,
        "snapshot": 4,
        "targets": 1,
        "desired": 2,
    }


def test_a_service_without_the_targets_key_can_still_renew(world: World) -> None:
    (world.folder / "keys/targets.pem").unlink()
    (world.folder / "keys/root.pem").unlink()
    world.clock.advance(days=31)
    assert Repository(world.store, world.keys, clock=world.clock).renew()
    assert verifier(world).refresh().models() == ()


def test_an_unreachable_service_is_a_fetch_error(world: World) -> None:
    world.source.error = FetchError("x", "connection refused")
    with pytest.raises(FetchError, match="connection refused"):
        verifier(world).refresh()


def test_a_crash_before_the_timestamp_leaves_the_old_state(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish(weights(0))
    replace = Store.replace

    def die_at_timestamp(self: Store, name: str, data: bytes) -> None:
        if name == TIMESTAMP:
            raise KeyboardInterrupt
        replace(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "replace", die_at_timestamp)
        with pytest.raises(KeyboardInterrupt):
            world.publish(weights(1))
    assert (before := verifier(world).refresh().desired("digits")) is not None
    assert before.version == "1"
    world.publish(weights(2))
    assert (after := verifier(world).refresh().desired("digits")) is not None
    assert after.version == "2"


def test_a_signed_store_is_not_signed_over(tmp_path: Path) -> None:
    repository = Repository(Store(tmp_path / "s"), Keys.create(tmp_path / "k"), lives=Lives(), clock=FakeClock())
    root = repository.create()
    with pytest.raises(TrustError, match="already"):
        repository.create()
    assert repository.root() == root
