"""Every case that concerns node, store or trust has a test that carries its number, every attack one with its name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.sync.trust.test_attacks import ATTACKS

TESTS = Path(__file__).resolve().parent.parent
# Of the cases of rollouts, 14, 15, 17 and 27 are the controller's.
ROLLOUT = [*range(1, 14), 16, *range(18, 27), 28]
NAMED_APART = {"eavesdrop", "drop requests", "slow retrieval"}  # they need a scene of their own


@cache
def names() -> frozenset[str]:
    texts = (path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    return frozenset(name for text in texts for name in re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE))


@pytest.mark.parametrize("number", ROLLOUT)
def test_a_case_of_rollouts_has_a_test_with_its_number(number: int) -> None:
    assert [name for name in names() if re.match(rf"test_rollout_case_{number}_", name)]


def test_the_ten_attacks_have_a_test_each() -> None:
    by_table = {name.removesuffix(" refused").removesuffix(" attack") for name, _ in ATTACKS}
    assert by_table | NAMED_APART == {
        "eavesdrop",
        "drop requests",
        "slow retrieval",
        "freeze",
        "partial bundle",
        "denial of service",
        "rollback",
        "endless data",
        "mix-and-match",
        "arbitrary software",
    }
    for name in NAMED_APART:
        assert [one for one in names() if one.startswith(f"test_attack_{name.replace(' ', '_')}_")]
