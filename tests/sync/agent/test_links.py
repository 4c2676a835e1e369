"""Links to what serves: an agent that starts again takes away what should not be there any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sync.agent.failpoints import stopping
from sync.agent.links import LinkInstaller
from sync.agent.ports import GateVerdict
from sync.agent.probation import ProbationLimits
from tests.sync.fakes import Killed, World, trained, weights


class Picky(LinkInstaller):
    """The golden set is not passed after the swap."""

    def recheck(self, model: str) -> GateVerdict | None:
        return GateVerdict(passed=False, detail="loss 0.9")


@pytest.fixture
def link(world: World) -> Path:
    return world.folder / "node/current/digits"


def installer(world: World, kind: type[LinkInstaller] = LinkInstaller) -> LinkInstaller:
    return kind(world.folder / "node/current", ("cpu-int8",))


def die_at(place: str) -> Callable[[str], None]:
    def stop(name: str) -> None:
        if name == place:
            raise Killed

    return stop


def test_a_rollback_to_nothing_that_a_restart_ends_leaves_no_link(world: World, link: Path) -> None:
    world.publish(weights())
    with world.agent(installer(world, Picky), probation=ProbationLimits(seconds=1)) as agent:
        agent.run_once()
        world.clock.advance(seconds=2)
        with stopping(die_at("rolling back")), pytest.raises(Killed):
            agent.look()
    assert link.is_symlink()
    with world.agent(installer(world)) as agent:
        agent.restore()
        assert [(status.state, status.active) for status in agent.status()] == [("CLOUD_ONLY", None)]
    assert not link.is_symlink()


def test_a_first_version_that_was_only_half_installed_is_not_linked(world: World, link: Path) -> None:
    world.publish(weights())
    with world.agent(installer(world)) as agent, stopping(die_at("activated")), pytest.raises(Killed):
        agent.run_once()
    assert link.is_symlink()
    world.publish(trained(weights(), seed=2))
    with world.agent(installer(world)) as agent:
        agent.restore()
        assert not link.is_symlink()
        assert agent.run_once()
    assert link.resolve().name == "2"


def test_a_damaged_version_with_nothing_before_it_is_not_linked(world: World, link: Path) -> None:
    world.publish(weights())
    with world.agent(installer(world)) as agent:
        assert agent.run_once()
    (link / "labels.txt").write_text("0")
    with world.agent(installer(world)) as agent:
        agent.restore()
        assert [(status.state, status.active) for status in agent.status()] == [("IDLE", None)]
    assert not link.is_symlink()
