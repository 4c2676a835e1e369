"""The wall clock steps, the monotonic one does not: nothing expires, stalls or goes back because of a step."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from sync.agent.probation import ProbationLimits
from sync.events import PollDone
from sync.trust.repository import Repository
from tests.sync.fakes import FakeClock, FakeInstaller, World, trained, weights

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


# --- a board without a battery ---


def test_rollout_case_7_a_node_that_boots_in_1970_serves_waits_and_recovers(
    world: World, installer: FakeInstaller
) -> None:
    world.publish(weights())
    with world.agent(installer) as agent:
        assert agent.run_once()
    world.publish(trained(weights()))
    board, again = FakeClock(datetime(1970, 1, 1, 0, 5, tzinfo=UTC)), FakeInstaller()
    world.source.fetched.clear()
    with world.agent(again, clock=board) as agent:
        agent.restore()
        assert again.serving == {"digits": "1"}
        assert not agent.run_once()  # tried again with backoff
        (status,) = agent.status()
        assert (status.state, status.code, status.active) == ("COMMITTED", "CLOCK", "1")
        assert "clock reads 1970-01-01 00:05" in status.reason
        assert (again.serving, world.source.fetched) == ({"digits": "1"}, [])
        board.wall = datetime.now(UTC)
        assert agent.run_once()
        (status,) = agent.status()
        assert (status.state, status.code, again.serving) == ("COMMITTED", "SERVES", {"digits": "2"})


def test_rollout_case_7_a_node_that_boots_in_2099_serves_and_recovers(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    with world.agent(installer) as agent:
        assert agent.run_once()
    world.publish(trained(weights()))
    board, again = FakeClock(datetime(2099, 1, 1, tzinfo=UTC)), FakeInstaller()
    with world.agent(again, clock=board) as agent:
        agent.restore()
        assert not agent.run_once()
        assert again.serving == {"digits": "1"}
        assert "clock reads 2099-01-01" in (agent.last_error or "")
        board.wall = datetime.now(UTC)
        assert agent.run_once()
        assert again.serving == {"digits": "2"}


def test_what_a_clock_of_2099_says_is_not_kept(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    with world.agent(installer, clock=FakeClock(datetime(2099, 1, 1, tzinfo=UTC))) as agent:
        assert not agent.run_once()
    with world.agent(installer) as agent:
        assert agent.run_once()
    assert installer.serving == {"digits": "1"}


def test_the_first_root_alone_proves_a_clock_of_1970_wrong(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    with world.agent(installer, clock=FakeClock(datetime(1970, 1, 1, tzinfo=UTC))) as agent:
        assert not agent.run_once()
        (status,) = agent.status()
        assert (status.state, status.code) == ("IDLE", "CLOCK")
    assert installer.serving == {}


def test_a_probation_ends_in_time_although_the_clock_was_set_back(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    with world.agent(installer, probation=ProbationLimits(seconds=60.0)) as agent:
        assert agent.run_once()
        world.clock.wall -= timedelta(days=300)
        agent.look()
        world.clock.advance(seconds=61)
        agent.look()
        (status,) = agent.status()
        assert status.state == "COMMITTED"
