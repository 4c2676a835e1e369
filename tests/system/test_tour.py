"""The tour passes; and with the cause of a step's claim taken away, that step fails and the exit code is 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Built
from tests.system.conftest import BUILD_S, outrider

pytestmark = pytest.mark.system


@pytest.fixture(scope="module", autouse=True)
def _built(photos: Built) -> None:
    """The large model is in `bundles` before a tour looks for it."""


def test_every_step_of_the_tour_holds(bundles: Path) -> None:
    done = outrider("up", "--once", "--bundles", bundles, timeout_s=BUILD_S)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ok")]
    assert steps == ["start:", "(a)", "(b)", "(c)", "(d)", "(e)", "(f)"]


@pytest.mark.parametrize(
    ("step", "cause", "says"),
    [
        ("a", "edge", "answered by cloud"),
        ("b", "cache", "answered by edge"),
        ("c", "fallback", "503"),
        ("d", "push", "do not serve digits 2"),
        ("d", "reuse", "are new"),
        ("e", "gate", "serves the version that collapses in INT8"),
        ("f", "corruption", "needed no `full`"),
    ],
)
def test_without_its_cause_a_step_fails(bundles: Path, step: str, cause: str, says: str) -> None:
    patience = ("--patience-s", 4) if cause == "push" else ()
    flags = ("--only", step, "--without", cause, *patience)
    done = outrider("up", "--once", "--bundles", bundles, *flags, timeout_s=BUILD_S)
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"FAIL  ({step})"), done.stdout + done.stderr
    assert says in last
