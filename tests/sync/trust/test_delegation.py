"""A model line whose releases a role of its own signs: nobody else's key can, and it can sign nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tuf.api.metadata import Metadata, MetaFile, TargetFile

from common.cli import main
from common.errors import AttackRefused, KeyMissing, MetadataExpired, TrustError
from sync.release import manifest_path
from sync.store import TIMESTAMP
from sync.trust.keys import Keys
from sync.trust.repository import Repository, stored_name
from sync.trust.rotation import Rotation
from sync.trust.rules import raise_floors
from tests.sync.fakes import FakeInstaller, World, trained, weights
from tests.sync.trust.places import Place, served


def listed_by(place: Place, role: str) -> set[str]:
    return set(place.repository.targets(role).targets)


def test_releases_go_to_the_role_that_has_the_model(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.publish("digits", 1)
    place.rotation().delegate("team", "digits")
    place.rotation().delegate("eyes", "photo?-*")
    for model, version in (("digits", 2), ("photos-a", 1), ("other", 1)):
        place.publish(model, version)
    assert listed_by(place, "targets") == {manifest_path("digits", "1"), manifest_path("other", "1")}
    assert listed_by(place, "team") == {manifest_path("digits", "2")}
    assert listed_by(place, "eyes") == {manifest_path("photos-a", "1")}
    view = place.node().refresh()
    assert {model: served(view, model) for model in view.models()} == {"digits": "2", "photos-a": "1", "other": "1"}
    for model, version in (("digits", "1"), ("digits", "2"), ("photos-a", "1")):
        assert place.repository.target(manifest_path(model, version)) == f"{model} {version}".encode()


def test_a_published_bundle_arrives_through_the_models_own_role(world: World, installer: FakeInstaller) -> None:
    agent, current = world.agent(installer), weights()
    world.publish(current)
    assert agent.run_once()
    repository = Repository(world.store, world.keys, clock=world.clock)
    Rotation(world.store, world.keys, repository).delegate("team", "digits")
    for name in ("targets.pem", "root.pem"):  # the team has neither
        (world.keys.folder / name).unlink()
    world.publish(trained(current, "fc.bias"))
    assert agent.run_once()
    assert installer.serving == {"digits": "2"}
    assert agent._journal.floors()["team"] == 2
    agent.close()


def forge(place: Place, role: str, path: str, signer_role: str) -> None:
    """Who holds the online keys and one of a team lists a target in the team's name."""
    target = TargetFile.from_data(path, b"forged", ["sha256"])
    place.store.replace(stored_name(target), b"forged")
    timestamp = Metadata.from_bytes(place.store.read(TIMESTAMP) or b"")
    folder = place.store.root / "metadata"
    snapshot = Metadata.from_file(str(folder / f"{timestamp.signed.snapshot_meta.version}.snapshot.json"))
    listing = Metadata.from_file(str(folder / f"{snapshot.signed.meta[f'{role}.json'].version}.{role}.json"))
    listing.signed.targets[path] = target
    for one, name, key in ((listing, role, signer_role), (snapshot, "snapshot", "snapshot")):
        one.signed.version += 1
        one.sign(place.keys.signer(key))
        (folder / f"{one.signed.version}.{name}.json").write_bytes(one.to_bytes())
        if one is listing:
            snapshot.signed.meta[f"{role}.json"] = MetaFile(version=one.signed.version)
    timestamp.signed.version += 1
    timestamp.signed.snapshot_meta = MetaFile(version=snapshot.signed.version)
    timestamp.sign(place.keys.signer("timestamp"))
    (folder / "timestamp.json").write_bytes(timestamp.to_bytes())


def test_a_team_cannot_sign_another_teams_model(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.rotation().delegate("team", "digits")
    place.rotation().delegate("eyes", "photos")
    place.publish("digits", 1)
    for path in ("releases/photos/7.json", "releases/other/7.json"):
        forge(place, "team", path, "team")
    view = place.node().refresh()
    assert view._target("releases/photos/7.json") is None
    assert view._target("releases/other/7.json") is None
    forge(place, "team", "releases/digits/7.json", "team")
    assert place.node().refresh()._target("releases/digits/7.json") == b"forged"  # its own: it may


def test_another_teams_key_is_no_key_of_this_role(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.rotation().delegate("team", "digits")
    place.rotation().delegate("eyes", "photos")
    place.publish("digits", 1)
    forge(place, "team", "releases/digits/7.json", "eyes")
    with pytest.raises(AttackRefused, match="arbitrary software"):
        place.node().refresh()._target("releases/digits/7.json")


def test_an_older_list_of_a_delegated_role_is_a_rollback(tmp_path: Path) -> None:
    """The tuf folder was wiped, so python-tuf has nothing to compare with; the floors have."""
    place = Place(tmp_path)
    place.rotation().delegate("team", "digits")
    for version in (1, 2, 3):
        place.publish("digits", version)
    floors = place.node().refresh().versions()
    assert floors == {"root": 1, "timestamp": 6, "snapshot": 6, "targets": 2, "desired": 4, "team": 4}
    older = dict(floors, team=3)
    with pytest.raises(AttackRefused, match="rollback attack refused: team metadata has version 3"):
        raise_floors(floors, older)


def test_a_team_whose_signature_ended_holds_up_its_own_model_only(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.rotation().delegate("team", "digits")
    place.publish("digits", 1)
    place.clock.advance(days=200)
    place.publish("other", 1)
    place.clock.advance(days=166)
    place.repository.renew()
    view = place.node().refresh()
    assert served(view, "other") == "1"
    with pytest.raises(MetadataExpired, match="team"):
        served(view, "digits")


def test_a_role_gets_more_models_and_keeps_its_keys(tmp_path: Path) -> None:
    place = Place(tmp_path, "office")
    first = place.rotation().delegate("team", "digits", add=2, threshold=2)
    assert {Path(path).parent.name for path in first.new} == {"keys", "office"}
    before = place.repository.signers("team")
    place.rotation().delegate("team", "letters-*")
    place.rotation().delegate("team", "letters-*")
    assert place.repository.signers("team") == before
    assert before.threshold == 2
    place.publish("letters-x", 1)
    assert listed_by(place, "team") == {manifest_path("letters-x", "1")}
    alone = Repository(place.store, Keys(place.keys.folder), clock=place.clock)
    with pytest.raises(KeyMissing, match="1 of the 2 needed"):
        alone.add({manifest_path("digits", "1"): b"{}"}, {})


@pytest.mark.parametrize(
    ("role", "models", "problem"),
    [
        ("targets", "digits", "name"),
        ("desired", "digits", "name"),
        ("a/b", "digits", "name"),
        ("..", "digits", "name"),
        ("team", "digits/*", "pattern"),
        ("team", "", "pattern"),
        ("team", "[a-z]", "pattern"),
        ("other", "photos", "signed by role 'eyes' already"),
    ],
)
def test_a_name_or_pattern_that_means_something_else_is_refused(
    tmp_path: Path, role: str, models: str, problem: str
) -> None:
    place = Place(tmp_path)
    place.rotation().delegate("eyes", "photos")
    with pytest.raises(TrustError, match=problem):
        place.rotation().delegate(role, models)


def test_the_commands_delegate_show_rotate_and_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--store", str(tmp_path / "s"), "--keys", str(tmp_path / "k")]
    keys = ["sync", "keys"]
    assert main([*keys, "init", *where]) == 0
    assert main([*keys, "delegate", "digits*", "--name", "team", *where]) == 0
    assert main([*keys, "rotate", "team", "--add", "1", "--threshold", "2", *where]) == 0
    capsys.readouterr()
    assert main([*keys, "status", *where]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    ids = line.partition("[")[2].partition("]")[0].split()
    assert line.startswith("team")
    assert line.endswith(f"2 of [{' '.join(ids)}], can be signed, models digits*: good")
    assert main([*keys, "revoke", ids[0], *where]) == 0
    told = capsys.readouterr().err
    assert "role team: 2 of [" in told
    assert ids[0] not in told.partition("[")[2]
    assert main([*keys, "revoke", ids[0], *where]) == 0  # as after a kill at the very end
    assert "counts no more" in capsys.readouterr().err
    assert main([*keys, "revoke", "0123456789", *where]) != 0
    assert main([*keys, "rotate", "root", "--threshold", "0", *where]) == 2
    assert main([*keys, "rotate", "root", "--store", str(tmp_path / "none"), "--keys", str(tmp_path / "k")]) == 2
