from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import AttackRefused
from sync.release import Desired
from sync.trust.rules import check_epoch, raise_floors

DESIRED = Desired(
    model="digits",
    epoch=4,
    version="3",
    digest="aa" * 32,
    manifest="releases/digits/3.json",
    manifest_hash="bb" * 32,
)
VERSIONS = st.dictionaries(st.sampled_from(["timestamp", "snapshot", "targets"]), st.integers(1, 9), min_size=1)


@given(history=st.lists(VERSIONS, max_size=8))
def test_floors_never_go_back(history: list[dict[str, int]]) -> None:
    floors: dict[str, int] = {}
    for seen in history:
        before = dict(floors)
        try:
            floors = raise_floors(floors, seen)
        except AttackRefused:
            assert any(seen[role] < before.get(role, 0) for role in seen)
        assert all(floors[role] >= version for role, version in before.items())


def test_a_rollback_is_named() -> None:
    with pytest.raises(AttackRefused, match="rollback attack refused: snapshot"):
        raise_floors({"snapshot": 5}, {"snapshot": 4})


def test_an_older_epoch_is_a_rollback_whatever_it_names() -> None:
    with pytest.raises(AttackRefused, match="rollback"):
        check_epoch(DESIRED, replace(DESIRED, epoch=3, version="9"))


def test_one_epoch_never_says_two_things() -> None:
    check_epoch(DESIRED, DESIRED)
    with pytest.raises(AttackRefused, match="mix-and-match"):
        check_epoch(DESIRED, replace(DESIRED, version="2"))


def test_a_higher_epoch_may_name_an_older_version() -> None:
    check_epoch(None, DESIRED)
    check_epoch(DESIRED, replace(DESIRED, epoch=5, version="1"))
