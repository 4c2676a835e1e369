from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import agent_kills


@pytest.mark.system
def test_rollout_case_4_an_agent_that_is_killed_while_it_works_serves_what_was_signed(tmp_path: Path) -> None:
    """`make soak` has 2,000 kills, and each failpoint 20 times."""
    outcome = agent_kills.run(tmp_path, kills=12, rounds=1, seed=5, places=("renamed", "activated"))
    assert outcome.problems == []
    assert outcome.lives == 12 + 2 + 1
    assert len(outcome.served) > 1
