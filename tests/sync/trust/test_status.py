from __future__ import annotations

import asyncio
import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from common.cli import main
from common.errors import TrustError
from sync.service import ServiceConfig, service
from sync.store import Store
from sync.trust.keys import ROLES, Keys
from sync.trust.repository import Lives, Repository
from sync.trust.rotation import Rotation
from sync.trust.status import role_status
from tests.sync.fakes import FakeClock

NOW = datetime.now(UTC).replace(microsecond=0)


def signed(folder: Path, days_ago: float) -> tuple[Store, Keys]:
    """A store whose metadata was all signed so long ago."""
    store, keys = Store(folder / "s"), Keys.create(folder / "k")
    Repository(store, keys, clock=FakeClock(NOW - timedelta(days=days_ago))).create()
    return store, keys


@pytest.mark.parametrize(
    ("days", "due", "expired"),
    [
        (0, set(), set()),
        (1.4, set(), set()),
        (1.6, {"timestamp"}, set()),  # good for 3 days
        (3.1, {"timestamp"}, {"timestamp"}),
        (46, {"timestamp", "snapshot", "desired"}, {"timestamp", "snapshot"}),  # 14 and 90
        (183, {"timestamp", "snapshot", "desired", "targets"}, {"timestamp", "snapshot", "desired"}),  # 365
    ],
)
def test_rollout_case_8_a_role_is_due_at_half_of_its_life(
    tmp_path: Path, days: float, due: set[str], expired: set[str]
) -> None:
    store, keys = signed(tmp_path, days)
    found = role_status(Repository(store, keys), keys, NOW, lives=Lives())
    assert [one.role for one in found] == list(ROLES)
    assert {one.role for one in found if one.is_due} == due
    assert {one.role for one in found if one.is_expired} == expired


def test_it_says_whose_keys_are_at_hand(tmp_path: Path) -> None:
    store, keys = signed(tmp_path, 0)
    (keys.folder / "root.pem").unlink()
    (keys.folder / "targets.pem").write_bytes((keys.folder / "desired.pem").read_bytes())  # a key, but not that role's
    found = {one.role: one for one in role_status(Repository(store, keys), keys, NOW, lives=Lives())}
    assert {role for role, one in found.items() if one.can_sign} == {"snapshot", "timestamp", "desired"}
    assert found["timestamp"].keyids == (keys.signer("timestamp").public_key.keyid,)
    assert {one.threshold for one in found.values()} == {1}


def test_the_command_exits_with_1_once_a_role_is_due(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, days, code in (("good", 0.5, 0), ("old", 2.0, 1)):
        (tmp_path / name).mkdir()
        store, keys = signed(tmp_path / name, days)
        where = ["sync", "keys", "status", "--store", str(store.root), "--keys", str(keys.folder)]
        assert main(where) == code
        text = capsys.readouterr().out
        assert ("past half of its life" in text) == (code == 1)
        assert main([*where, "--json"]) == code
        roles = json.loads(capsys.readouterr().out)["roles"]
        assert [one["role"] for one in roles if one["is_due"]] == ["timestamp"] * code


def test_a_delegated_role_and_a_threshold_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it was signed 200 days ago; what is online has been signed again since, and the team's list has not."""
    store, keys = signed(tmp_path, 200)
    clock = FakeClock(NOW - timedelta(days=200))
    repository = Repository(store, keys, clock=clock)
    Rotation(store, keys, repository).delegate("team", "digits*", add=3, threshold=2)
    clock.wall = NOW
    repository.add({"releases/other/1.json": b"{}"}, {})
    where = ["sync", "keys", "status", "--store", str(store.root), "--keys", str(keys.folder), "--json"]
    assert main(where) == 1
    roles = {one["role"]: one for one in json.loads(capsys.readouterr().out)["roles"]}
    assert list(roles) == [*ROLES, "team"]
    assert [role for role, one in roles.items() if one["is_due"]] == ["team"]
    team = roles["team"]
    assert (team["threshold"], len(team["keyids"]), team["models"], team["can_sign"]) == (2, 3, ["digits*"], True)
    for name in ("team.pem", "team.3.pem"):
        (keys.folder / name).unlink()
    main(where)
    roles = {one["role"]: one for one in json.loads(capsys.readouterr().out)["roles"]}
    assert [role for role, one in roles.items() if not one["can_sign"]] == ["team"]
    assert main(where[:-3]) == 1  # without keys at hand


def test_a_store_without_metadata_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="keys init"):
        role_status(Repository(Store(tmp_path), Keys(tmp_path)), None, NOW, lives=Lives())


@pytest.mark.asyncio
async def test_the_service_says_once_that_a_role_is_due(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, _ = signed(tmp_path, 2.0)
    with caplog.at_level(logging.WARNING, logger="sync.service"):
        async with service(ServiceConfig(store=str(store.root))):
            for _ in range(100):
                if caplog.records:
                    break
                await asyncio.sleep(0.05)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "role 'timestamp' is past half of its life"
    ]
