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


# Causes that stand in nobody's way share a system: its steps, what is taken away, and how each step has to fail.
DRILLS = {
    "cache, fallback and push": (
        "abcd",
        ("cache", "fallback", "push"),
        {"b": "answered by edge", "c": "503", "d": "do not serve digits 2"},
    ),
    "edge, reuse, gate and corruption": (
        "adef",
        ("edge", "reuse", "gate", "corruption"),
        {
            "a": "answered by cloud",
            "d": "are new",
            "e": "serves the version that collapses in INT8",
            "f": "needed no `full`",
        },
    ),
}


@pytest.mark.parametrize("drill", DRILLS)
def test_without_its_cause_a_step_fails(bundles: Path, drill: str) -> None:
    steps, causes, expected = DRILLS[drill]
    flags = [flag for cause in causes for flag in ("--without", cause)]
    if "push" in causes:
        flags += ["--patience-s", "4"]
    done = outrider("up", "--once", "--bundles", bundles, "--only", steps, "--keep-going", *flags, timeout_s=BUILD_S)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = {line.split()[1].strip("()"): line for line in done.stdout.splitlines()}
    failed = {step: line for step, line in lines.items() if line.startswith("FAIL")}
    assert failed.keys() == expected.keys(), done.stdout + done.stderr
    for step, says in expected.items():
        assert says in failed[step]
