"""A sample of each of the long checks on a whole node: the same code, fewer rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from sync.agent.failpoints import NAMES
from tests.soak import disk_full, node_kills, swaps


@pytest.mark.parametrize("place", NAMES)
def test_a_disk_that_is_full_from_a_failpoint_on_keeps_the_old_version_serving(tmp_path: Path, place: str) -> None:
    problems = disk_full.run(tmp_path, [place])
    if problems is None:
        pytest.skip("no right to mount a small disk here")
    assert problems == []


async def test_rollout_case_24_a_node_that_is_killed_under_load_answers_as_its_stamp_says(tmp_path: Path) -> None:
    result = await node_kills.run(tmp_path, kills=1, seed=1)
    assert result.problems == []
    assert result.figures["answers"] > 0


async def test_rollout_case_21_swaps_under_load_fail_no_call_and_mix_no_versions(tmp_path: Path) -> None:
    result = await swaps.run(tmp_path, swaps=4, rate=100.0)
    assert (result.figures["failed"], result.figures["mixed"]) == (0, 0)  # p99 is for the long run
    assert result.figures["calls"] > 100
