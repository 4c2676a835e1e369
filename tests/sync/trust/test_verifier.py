"""The verifier against a repository, through a transport that lies. Also the tests of `sync/trust/repository.py`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from common.errors import AttackRefused, BadRelease, FetchError, MetadataExpired, TrustError
from sync.store import TIMESTAMP, Store
from sync.trust.keys import Keys
from sync.trust.repository import Lives, Repository
from sync.trust.verifier import Verifier
from tests.sync.fakes import FakeClock, World, weights


def verifier(world: World, name: str = "tuf") -> Verifier:
    return Verifier(world.folder / name, world.root.read_bytes(), world.source.read, world.clock)


def saved(world: World) -> Path:
    """A copy of the metadata as it is now, for an attacker to serve later."""
    copy = world.folder / "saved"
    shutil.copytree(world.store.root / "metadata", copy)
    return copy


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


def test_metadata_signed_by_a_stranger_is_refused_as_arbitrary_software(world: World, tmp_path: Path) -> None:
    world.publish(weights())
    stranger = World(tmp_path / "stranger")
    stranger.publish(weights(7))
    world.source.store = stranger.store
    with pytest.raises(AttackRefused, match="arbitrary software"):
        verifier(world).refresh()


def test_an_old_timestamp_is_refused_as_rollback(world: World) -> None:
    world.publish(weights(0))
    old = saved(world)
    world.publish(weights(1))
    one = verifier(world)
    one.refresh()
    shutil.copy(old / "timestamp.json", world.store.root / TIMESTAMP)
    with pytest.raises(AttackRefused, match="rollback"):
        one.refresh()


def test_a_snapshot_of_another_time_is_refused_as_mix_and_match(world: World) -> None:
    world.publish(weights(0))
    world.publish(weights(1))
    old = (world.store.root / "metadata/3.snapshot.json").read_bytes()
    world.source.tamper = lambda name, data: old if name.endswith(".snapshot.json") else data
    with pytest.raises(AttackRefused, match="mix-and-match"):
        verifier(world).refresh()


def test_endless_metadata_is_cut_off(world: World) -> None:
    world.source.tamper = lambda name, data: data + bytes(1 << 20) if name == TIMESTAMP else data
    with pytest.raises(AttackRefused, match="endless data"):
        verifier(world).refresh()


def test_a_tampered_manifest_is_refused(world: World) -> None:
    world.publish(weights())
    world.source.tamper = lambda name, data: data[:-1] + bytes([data[-1] ^ 1]) if "releases" in name else data
    view = verifier(world).refresh()
    desired = view.desired("digits")
    assert desired is not None
    with pytest.raises(TrustError):
        view.manifest(desired)


def test_the_online_key_cannot_sign_a_release(world: World) -> None:
    """A hostile controller holds the `desired` key: it can point at signed releases only, whatever it lists itself."""
    world.publish(weights())
    repository = Repository(world.store, world.keys)
    repository.add({}, {"releases/digits/2.json.zst": b"{}", "desired/digits.json": hostile_desired()})
    view = verifier(world).refresh()
    desired = view.desired("digits")
    assert desired is not None
    with pytest.raises(AttackRefused, match="arbitrary software"):
        view.manifest(desired)


def hostile_desired() -> bytes:
    fields = {"model": "digits", "epoch": 2, "version": "2", "digest": "aa" * 32, "manifest_hash": "bb" * 32}
    return json.dumps({**fields, "manifest": "releases/digits/2.json.zst", "format": 1}).encode()


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
    assert verifier(world).refresh().versions() == {"timestamp": 4, "snapshot": 4, "targets": 1, "desired": 2}


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
