"""The wall clock steps, the monotonic one does not: nothing expires, stalls or goes back because of a step."""

from __future__ import annotations

from datetime import timedelta

import pytest

from sync.events import PollDone
from sync.trust.repository import Repository
from tests.sync.fakes import FakeInstaller, World, trained, weights

HOUR = timedelta(hours=1)


def test_pushes_arrive_through_steps_of_an_hour_either_way(world: World, installer: FakeInstaller) -> None:
    agent, current = world.agent(installer), weights()
    for version, step in enumerate((0, +1, -1, -1, +1, 0), start=1):
        world.clock.wall += step * HOUR
        world.publish(current)
        assert agent.run_once()
        assert installer.serving == {"digits": str(version)}
        current = trained(current, "fc.bias", seed=version)
    assert [event.error for event in world.events_of(PollDone)] == [None] * 6
    agent.close()


@pytest.mark.parametrize("step", [+HOUR, -HOUR])
def test_what_was_signed_before_a_step_is_believed_after_it(
    world: World, installer: FakeInstaller, step: timedelta
) -> None:
    world.publish(weights())
    world.clock.wall += step
    agent = world.agent(installer)
    assert agent.run_once()
    assert installer.serving == {"digits": "1"}
    agent.close()


@pytest.mark.parametrize("step", [+HOUR, -HOUR])
def test_a_step_moves_no_poll(world: World, installer: FakeInstaller, step: timedelta) -> None:
    agent = world.agent(installer, interval_s=900.0)
    world.publish(weights())
    agent.run_once()
    (before,) = agent.status()
    world.clock.wall += step
    (after,) = agent.status()
    assert 810 <= before.next_try_s <= 990
    assert after.next_try_s == before.next_try_s
    agent.close()


@pytest.mark.parametrize("step", [+HOUR, -HOUR])
def test_a_step_does_not_have_everything_signed_again(world: World, step: timedelta) -> None:
    repository = Repository(world.store, world.keys, clock=world.clock)
    world.publish(weights())
    world.clock.wall += step
    assert not repository.renew()
