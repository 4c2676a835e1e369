"""From a release that no pack leads from any more: by way of one between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sync.agent.fetch import Assembly, Fetched
from sync.agent.local import LocalSlabs, verify_files
from sync.agent.wants import between
from sync.store import pack_name
from tests.sync.agent.test_fetch import damage, installed, packs, release
from tests.sync.fakes import World, weights

ROWS = 250


def trained(old: dict[str, Any], *names: str, seed: int = 1) -> dict[str, Any]:
    """Steps so small that two of them are shorter than the whole."""
    rng = np.random.default_rng(seed)
    steps = {name: rng.normal(scale=1e-6, size=old[name].shape).astype(np.float32) for name in names or old}
    return {name: value + steps[name] if name in steps else value for name, value in old.items()}


@pytest.fixture
def old(world: World, tmp_path: Path) -> Any:
    """Versions 1 to 3, of which version 1 is on the disk, and no pack from 1 to 3."""
    current = weights(rows=ROWS)
    for seed in range(3):
        world.publish(current)
        current = trained(current, seed=seed)
    known = installed(world, tmp_path, "1")
    world.store.drop_pack(digest(world, "3"), digest(world, "1"))
    return known


def digest(world: World, version: str) -> str:
    return release(world, version).manifest.digest()


def run(world: World, folder: Path, known: Any, **options: Any) -> Fetched:
    folder.mkdir()
    result = Fetched()
    options.setdefault("manifest_of", lambda version: world.publisher.manifest("digits", version))
    Assembly(release(world, "3"), folder, LocalSlabs(known), **options).run(world.source, result)
    assert verify_files(release(world, "3"), folder) is None
    return result


def test_two_packs_lead_where_none_does_alone(world: World, tmp_path: Path, old: Any) -> None:
    result = run(world, tmp_path / "chain", old)
    assert ("full" in result.bytes_by_form, result.fallbacks) == (False, 0)
    one, two, three = (digest(world, version) for version in "123")
    assert {each.name for each in world.source.fetched} == {pack_name(three, two), pack_name(two, one)}
    in_full = run(world, tmp_path / "full", old, manifest_of=lambda version: None)
    assert sum(result.bytes_by_form.values()) < 0.75 * sum(in_full.bytes_by_form.values())


def test_without_a_release_between_or_its_packs_it_comes_in_full(world: World, tmp_path: Path, old: Any) -> None:
    assert "full" in run(world, tmp_path / "unknown", old, manifest_of=lambda version: None).bytes_by_form
    world.store.drop_pack(digest(world, "2"), digest(world, "1"))
    result = run(world, tmp_path / "no pack", old)
    assert "full" in result.bytes_by_form
    assert result.fallbacks == 0


def test_a_wrong_step_costs_that_slab_its_full(world: World, tmp_path: Path, old: Any) -> None:
    for path in packs(world, "2"):
        damage(path, path.stat().st_size // 3)
    result = run(world, tmp_path / "out", old)
    fulls = [each for each in world.source.fetched if each.name.endswith(".full")]
    assert result.fallbacks == len(fulls) == 1
    assert result.fetched > 1


def test_a_chain_that_is_no_shorter_than_the_full_is_not_taken(world: World, tmp_path: Path) -> None:
    current = weights(rows=ROWS)
    for seed in range(3):
        world.publish(current)
        rough = weights(seed + 1, rows=ROWS)
        current = {name: value + rough[name] * 0.2 for name, value in current.items()}
    known = installed(world, tmp_path, "1")
    world.store.drop_pack(digest(world, "3"), digest(world, "1"))
    result = run(world, tmp_path / "out", known)
    assert set(result.bytes_by_form) == {"index", "full"}


def test_a_slab_that_the_release_between_has_already_takes_one_step(world: World, tmp_path: Path) -> None:
    first = weights(rows=ROWS)
    second = trained(first)
    for tensors in (first, second, trained(second, "fc.weight")):
        world.publish(tensors)
    known = installed(world, tmp_path, "1")
    world.store.drop_pack(digest(world, "3"), digest(world, "1"))
    result = run(world, tmp_path / "out", known)
    assert "full" not in result.bytes_by_form


def test_the_release_in_the_middle_is_asked_about_first() -> None:
    assert between("1", "3") == ["2"]
    assert between("1", "2") == between("5", "1") == between("4", "4") == []
    assert between("1", "9") == ["5", "6", "4"]
    assert between("1", "4") == ["2", "3"]
