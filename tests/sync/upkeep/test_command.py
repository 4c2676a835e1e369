from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from sync.upkeep.command import add_store, parse_bytes
from tests.sync.fakes import World, trained, weights


def run(*args: str) -> int:
    parser = argparse.ArgumentParser()
    add_store(parser.add_subparsers())
    parsed = parser.parse_args(args)
    return int(parsed.run(parsed))


@pytest.fixture
def store(world: World) -> str:
    for seed in (1, 2, 3):
        world.publish(trained(weights(rows=16), "fc.weight", seed=seed))
    return str(world.store.root)


def test_gc_says_what_it_keeps_and_removes(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("gc", "--store", store, "--keep", "2", "--dry-run", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["kept"], said["dry_run"]) == ({"digits": [3, 2]}, True)
    assert run("gc", "--store", store, "--keep", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out) == said | {"dry_run": False}
    assert run("gc", "--store", store, "--keep", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["digits: kept 3, 2", f"removed: nothing; 0 bytes, {said['bytes_left']} are left"]


def test_a_quota_that_is_missed_is_an_exit_code(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("gc", "--store", store, "--quota", "1GB") == 0
    assert run("gc", "--store", store, "--quota", "1kB", "--json") == 1
    said, problem = capsys.readouterr()
    assert json.loads(said.splitlines()[-1])["over_bytes"] > 0
    assert "the quota of 1000 bytes is missed by" in problem


def test_verify_exits_with_1_until_it_is_healed(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "--store", store) == 0
    path = next(Path(store).glob("packs/*/*.pack"))
    path.write_bytes(path.read_bytes()[:-1])
    capsys.readouterr()
    assert run("verify", "--store", store, "--json") == 1
    said = json.loads(capsys.readouterr().out)
    (finding,) = said["findings"]
    assert (said["good"], finding["state"], finding["name"]) == (False, "damaged", str(path.relative_to(store)))
    assert run("verify", "--store", store, "--repair") == 0
    assert f"{path.relative_to(store)}: was damaged" in capsys.readouterr().out
    assert run("verify", "--store", store) == 0


def test_a_wrong_path_is_no_store_and_becomes_none(tmp_path: Path) -> None:
    for command in ("gc", "verify"):
        with pytest.raises(ConfigError, match="no signed metadata"):
            run(command, "--store", str(tmp_path / "typo"))
    assert not (tmp_path / "typo").exists()


def test_less_than_two_releases_are_refused(store: str) -> None:
    with pytest.raises(ConfigError, match="2 or more"):
        run("gc", "--store", store, "--keep", "1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("1500", 1500), ("10GB", 10**10), ("1.5 GiB", 1610612736), ("500m", 5 * 10**8), ("2TB", 2 * 10**12)],
)
def test_bytes_are_read_with_their_unit(text: str, expected: int) -> None:
    assert parse_bytes(text, "here", "--quota") == expected


@pytest.mark.parametrize("text", ["", "-1", "10 XB", "GB", "1iB", "1e9", "1,5GB", "9" * 30])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="accepted: bytes"):
        parse_bytes(text, "here", "--quota")
