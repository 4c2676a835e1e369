"""Changing the keys that count: every node takes the store at every point, and what was cut off is completed."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tuf.api.metadata import Metadata

from common.errors import AttackRefused, KeyMissing, TrustError
from sync.store import TIMESTAMP, Store
from sync.trust.chain import read_chain
from sync.trust.keys import Keys
from sync.trust.repository import Repository
from tests.sync.trust.places import Place, served

EVERY_ROLE = ("root", "targets", "snapshot", "timestamp", "desired", "team")


def place_with_team(folder: Path, *folders: str) -> Place:
    place = Place(folder, *folders)
    place.rotation().delegate("team", "digits*")
    place.publish()
    return place


Image = dict[Path, bytes]


def image_of(place: Place) -> Image:
    """Every file of store and keys."""
    files = [path for root in (place.store.root, place.keys.folder) for path in root.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files if not path.name.startswith(".tmp-")}


def restore(image: Image, place: Place) -> None:
    for path in image_of(place).keys() - image.keys():
        path.unlink()
    for path, data in image.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o600)
    place.repository = Repository(place.store, place.keys, clock=place.clock)  # of the next process


def images_of(monkeypatch: pytest.MonkeyPatch, place: Place, command: Callable[[], object]) -> list[Image]:
    """What a kill leaves behind, whenever it comes: each state of the disk during the command, once."""
    found: list[Image] = []

    def fsync(fd: int) -> None:
        if (image := image_of(place)) not in found:
            found.append(image)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        command()
    return found


def check_taken(place: Place, *names: str) -> None:
    """By nodes of these names, by one that was never here, and by the publisher."""
    for name in (*names, f"new-{len(list(place.folder.iterdir()))}"):
        assert served(place.node(name).refresh()) == "1"
    assert not place.repository.renew()


@pytest.mark.parametrize(
    ("role", "is_lost"),
    [("root", False), ("targets", False), ("snapshot", False), ("team", False), ("timestamp", True)],
)
def test_a_change_that_is_killed_anywhere_is_completed_by_the_same_and_nodes_take_each_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, is_lost: bool
) -> None:
    place = place_with_team(tmp_path)
    place.node("old").refresh()
    (key,) = place.keys.files(role)
    if is_lost:
        key.path.unlink()

    def change() -> None:
        if is_lost:
            place.rotation().revoke(key.keyid)
        else:
            place.rotation().rotate(role)

    images = images_of(monkeypatch, place, change)
    begun = [image for image in images if place.keys.folder / ".changing" in image]
    assert len(begun) >= 4
    for number, image in enumerate(images):
        restore(image, place)
        shutil.copytree(tmp_path / "old", tmp_path / str(number), symlinks=True)
        check_taken(place, str(number))
        change()
        assert served(place.node(str(number)).refresh()) == "1"
        assert [one.keyid for one in place.keys.files(role)] == list(place.repository.signers(role).keys) != [key.keyid]
        assert not (place.keys.folder / ".changing").exists()


@pytest.mark.parametrize("role", EVERY_ROLE)
def test_the_old_key_is_set_aside_and_signs_nothing_any_more(tmp_path: Path, role: str) -> None:
    place = place_with_team(tmp_path)
    (old,) = place.keys.files(role)
    place.rotation().rotate(role)
    (new,) = place.keys.files(role)
    assert new.path.name == f"{role}.2.pem"
    assert stat.S_IMODE(new.path.stat().st_mode) == 0o600
    assert [path.name for path in (place.keys.folder / "retired").iterdir()] == [f"{role}.{old.keyid[:16]}.pem"]
    version = place.repository.signed()[role].version
    name = TIMESTAMP if role == "timestamp" else f"metadata/{version}.{role}.json"
    expected = {new.keyid, old.keyid} if role == "root" else {new.keyid}  # whoever trusts the last root has to go along
    assert set(Metadata.from_bytes(place.store.read(name) or b"").signatures) == expected


def test_a_key_that_does_not_count_is_refused_by_name(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (old,) = place.keys.files("targets")
    data = old.path.read_bytes()
    place.rotation().rotate("targets")
    (new,) = place.keys.files("targets")
    new.path.write_bytes(data)
    with pytest.raises(KeyMissing, match=r"0 of the 1 needed .*targets\.2\.pem does not count"):
        place.publish()


def test_what_only_a_revoked_key_signed_is_refused(tmp_path: Path) -> None:
    """A thief has every online key and the way to the nodes; then the keys are revoked."""
    place, thief = Place(tmp_path), tmp_path / "thief"
    place.publish()
    place.node("before").refresh()
    stolen = {role: place.keys.signer(role) for role in ("snapshot", "timestamp", "desired")}
    shutil.copytree(place.keys.folder, thief)
    for role in stolen:
        place.rotation().revoke(stolen[role].public_key.keyid[:8])
    copy = Store(tmp_path / "copy")
    for path in (place.store.root / "metadata").iterdir():
        copy.replace(f"metadata/{path.name}", path.read_bytes())
    for name in ("before", "new"):
        assert served(place.node(name).refresh()) == "1"
    forged = Metadata.from_bytes(copy.read(TIMESTAMP) or b"")
    forged.signed.version += 1
    forged.sign(stolen["timestamp"])
    copy.replace(TIMESTAMP, forged.to_bytes())
    place.source.store = copy
    for name in ("before", "newer"):
        with pytest.raises(AttackRefused, match="arbitrary software"):
            place.node(name).refresh()
    with pytest.raises(KeyMissing, match="does not count"):
        Repository(place.store, Keys(thief), clock=place.clock).add({}, {})


def test_a_node_that_was_away_over_many_changes_catches_up(tmp_path: Path) -> None:
    place = place_with_team(tmp_path)
    place.node().refresh()
    for _ in range(3):
        for role in EVERY_ROLE:
            place.rotation().rotate(role)
    assert place.repository.newest_root().version == 1 + 3 * 4
    check_taken(place, "node")
    assert place.repository.root() == place.root
    assert read_chain(place.store).problems == {}


def test_more_roots_than_the_library_walks_by_itself_are_walked(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.publish()
    signer, root = place.keys.signer("root"), place.repository.newest_root()
    for root.version in range(2, 260):  # python-tuf stops after 256
        metadata = Metadata(root)
        metadata.sign(signer)
        (place.store.root / f"metadata/{root.version}.root.json").write_bytes(metadata.to_bytes())
    place.rotation().rotate("timestamp")
    assert served(place.node().refresh()) == "1"


# --- thresholds ---


def test_two_of_three_root_keys_in_different_folders_have_to_sign(tmp_path: Path) -> None:
    place = Place(tmp_path, "b", "c")
    place.rotation().rotate("root", add=2, threshold=2)
    where = {one.path.parent.name: one for one in place.keys.files("root")}
    assert set(where) == {"keys", "b", "c"}
    place.publish()
    alone = Keys(place.keys.folder)
    place.keys = alone
    with pytest.raises(KeyMissing, match="not enough"):
        Place.rotation(place_like(place, alone)).rotate("timestamp")
    two = Keys(place.keys.folder, tmp_path / "c")
    place_like(place, two).rotation().rotate("timestamp")
    newest = Metadata.from_file(str(place.store.root / "metadata/3.root.json"))
    assert set(newest.signatures) == {where["keys"].keyid, where["c"].keyid}
    check_taken(place)


def place_like(place: Place, keys: Keys) -> Place:
    """The same store, with other keys at hand."""
    other = Place.__new__(Place)
    other.__dict__ |= place.__dict__
    other.keys, other.repository = keys, Repository(place.store, keys, clock=place.clock)
    return other


@pytest.mark.parametrize("role", ["root", "targets", "timestamp", "team"])
def test_of_three_keys_with_a_threshold_of_two_one_may_be_revoked(tmp_path: Path, role: str) -> None:
    place = place_with_team(tmp_path)
    place.rotation().rotate(role, add=2, threshold=2)
    (gone, *kept) = [one.keyid for one in place.keys.files(role)]
    place.rotation().revoke(gone)
    assert (place.repository.signers(role).threshold, set(place.repository.signers(role).keys)) == (2, set(kept))
    check_taken(place)


@pytest.mark.parametrize("role", ["root", "targets", "timestamp", "team"])
def test_one_signature_of_the_two_needed_is_not_enough(tmp_path: Path, role: str) -> None:
    place = place_with_team(tmp_path)
    place.rotation().rotate(role, add=1, threshold=2)
    check_taken(place)
    next(iter(place.keys.files(role))).path.unlink()
    root = place.repository.newest_root()
    again = {
        "root": lambda: place.repository.commit_root(root),
        "targets": lambda: place.publish("photos", 2),  # which no other role signs
    }
    with pytest.raises(KeyMissing, match=rf"'{role}': 1 of the 2 needed"):
        again.get(role, lambda: place.publish("digits", 2))()


def test_nothing_is_begun_that_cannot_be_completed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    before = sorted(path.name for path in place.keys.folder.iterdir())
    with pytest.raises(TrustError, match="2 keys, so 3"):
        place.rotation().rotate("root", add=1, threshold=3)
    (place.keys.folder / "root.pem").rename(tmp_path / "drawer.pem")
    with pytest.raises(KeyMissing, match="'root'"):
        place.rotation().rotate("timestamp")
    (place.keys.folder / "targets.pem").rename(tmp_path / "office.pem")
    with pytest.raises(KeyMissing, match="'targets'"):
        place.rotation().rotate("desired")
    with pytest.raises(TrustError, match="no role 'photos'"):
        place.rotation().rotate("photos")
    for keyid in ("0123456", "0123456789", 'expires":"2'):
        with pytest.raises(TrustError, match=r"not a key's id|no key that counts"):
            place.rotation().revoke(keyid)
    left = {path.name for path in place.keys.folder.iterdir()}
    assert left == set(before) - {"root.pem", "targets.pem"}


def test_another_change_does_not_begin_before_the_first_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    images = images_of(monkeypatch, place, lambda: place.rotation().rotate("timestamp"))
    restore(images[len(images) // 2], place)
    with pytest.raises(TrustError, match="keys rotate timestamp"):
        place.rotation().rotate("snapshot")
    place.rotation().rotate("timestamp")
    place.rotation().rotate("snapshot")


def test_a_key_that_somebody_else_made_can_be_taken(tmp_path: Path) -> None:
    place = Place(tmp_path)
    theirs = Ed25519PrivateKey.generate()
    public = tmp_path / "theirs.pub"
    public.write_bytes(theirs.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    place.rotation().rotate("root", add=0, public=[public])
    named = [key.keyval["public"] for key in place.repository.signers("root").keys.values()]
    assert theirs.public_key().public_bytes_raw().hex() in named
    with pytest.raises(KeyMissing, match="1 of those would be here"):
        place.rotation().rotate("root", add=0, threshold=2)
    public.write_text("no key")
    with pytest.raises(KeyMissing, match="PEM"):
        place.rotation().rotate("root", add=0, public=[public])


def test_a_root_is_signed_again_before_it_ends(tmp_path: Path) -> None:
    place = Place(tmp_path)
    before = place.repository.newest_root()
    place.clock.advance(days=400)
    place.rotation().rotate("root", add=0)
    after = place.repository.newest_root()
    assert (after.version, after.roles["root"].keyids) == (2, before.roles["root"].keyids)
    assert (after.expires - before.expires).days == 400
    assert json.loads(place.repository.root())["signed"]["version"] == 1


def test_a_store_whose_root_has_ended_is_signed_once_there_is_a_new_root(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.clock.advance(days=3651)
    with pytest.raises(TrustError, match=r"the clock reads .* rotate root --add 0"):
        place.publish()
    place.rotation().rotate("root", add=0)
    place.publish()
    check_taken(place)
