"""Probation: a version that has begun to serve stays, or the one before comes back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from common.serving.vitals import Vitals
from sync.agent import Agent
from sync.agent.agent import ModelStatus
from sync.agent.failpoints import stopping
from sync.agent.probation import ProbationLimits, judge
from sync.agent.states import Code
from sync.events import Installed, Quarantined
from tests.sync.fakes import FakeInstaller, Killed, World, trained, weights

LIMITS = ProbationLimits(seconds=60.0)


def vitals(answers: int, errors: int = 0, latency_s: float | None = 0.002, version: str = "2") -> Vitals:
    return Vitals(version=version, answers=answers, errors=errors, latency_s=latency_s)


# --- the rules ---


@pytest.mark.parametrize(
    ("now", "before", "code"),
    [
        (vitals(0), None, None),
        (vitals(0, 2), None, None),  # too few to say anything
        (vitals(0, 3), None, Code.ERRORS),
        (vitals(97, 3), None, None),
        (vitals(90, 10), None, Code.ERRORS),
        (vitals(90, 10), vitals(92, 8, version="1"), None),  # no worse than the one before
        (vitals(80, 20), vitals(92, 8, version="1"), Code.ERRORS),
        (vitals(100, latency_s=0.011), vitals(9, version="1"), Code.LATENCY),
        (vitals(100, latency_s=0.009), vitals(9, version="1"), None),
        (vitals(49, latency_s=0.9), vitals(9, version="1"), None),
        (vitals(100, latency_s=0.9), None, None),
        (vitals(100, latency_s=0.9), vitals(0, latency_s=None, version="1"), None),
        (vitals(0, latency_s=None), vitals(9, version="1"), None),
    ],
)
def test_a_version_fails_for_what_it_does_worse(now: Vitals, before: Vitals | None, code: Code | None) -> None:
    failed = judge(now, before, LIMITS)
    assert (None if failed is None else failed.code) is code


# --- what follows ---


@pytest.fixture
def installer() -> FakeInstaller:
    return FakeInstaller()


def only(agent: Agent) -> ModelStatus:
    (status,) = agent.status()
    return status


def on_probation(world: World, installer: FakeInstaller) -> Agent:
    """Version 1 was committed, version 2 has just begun to serve."""
    world.publish(weights())
    with world.agent(installer) as agent:
        assert agent.run_once()
    world.publish(trained(weights()))
    agent = world.agent(installer, probation=LIMITS)
    agent.restore()
    assert agent.run_once()
    assert (only(agent).state, only(agent).active, only(agent).previous) == ("PROBATION", "2", "1")
    assert installer.serving == {"digits": "2"}
    return agent


def test_a_version_that_does_well_is_committed_when_its_time_is_over(world: World, installer: FakeInstaller) -> None:
    with on_probation(world, installer) as agent:
        installer.measured["digits"] = vitals(1000), vitals(1000, version="1")
        world.clock.advance(seconds=59)
        agent.look()
        assert (only(agent).state, installer.rechecked) == ("PROBATION", [])
        world.clock.advance(seconds=2)
        agent.look()
        assert (only(agent).state, only(agent).code, only(agent).active) == ("COMMITTED", "SERVES", "2")
        assert installer.rechecked == ["2"]  # the golden set, on what serves
        assert installer.before == {}  # the engine before it may go


def check_rolled_back(world: World, agent: Agent, installer: FakeInstaller, code: str) -> None:
    status = only(agent)
    assert (status.state, status.code, status.version, status.active) == ("QUARANTINED", code, "2", "1")
    assert installer.serving == {"digits": "1"}
    assert [event.version for event in world.events_of(Quarantined)] == ["2"]
    assert {path.name for path in (world.folder / "node/models/digits").iterdir()} == {"1"}
    world.source.fetched.clear()
    assert agent.run_once()  # the same is desired still
    assert (world.source.fetched, only(agent).state) == ([], "QUARANTINED")


def test_rollout_case_19_errors_bring_the_version_before_back_at_once(world: World, installer: FakeInstaller) -> None:
    with on_probation(world, installer) as agent:
        calls = len(installer.calls)
        installer.measured["digits"] = vitals(5, 5), vitals(1000, version="1")
        agent.look()
        assert "5 of 10 calls failed" in only(agent).reason
        assert len(installer.calls) == calls  # its engine was still open: nothing was built
        check_rolled_back(world, agent, installer, "ERRORS")


def test_a_slow_version_is_rolled_back(world: World, installer: FakeInstaller) -> None:
    with on_probation(world, installer) as agent:
        installer.measured["digits"] = vitals(60, latency_s=0.1), vitals(60, version="1")
        agent.look()
        check_rolled_back(world, agent, installer, "LATENCY")


def test_what_is_measured_of_another_version_is_not_held_against_it(world: World, installer: FakeInstaller) -> None:
    with on_probation(world, installer) as agent:
        installer.measured["digits"] = vitals(0, 100, version="1"), None
        agent.look()
        assert only(agent).state == "PROBATION"


def test_the_golden_set_is_asked_again_on_what_serves(world: World, installer: FakeInstaller) -> None:
    with on_probation(world, installer) as agent:
        installer.bad_later.add("2")
        world.clock.advance(seconds=61)
        agent.look()
        assert "run again after the swap: loss 0.5" in only(agent).reason
        check_rolled_back(world, agent, installer, "GATE_FAILED")


def test_something_newer_waits_for_the_end_of_probation(world: World, installer: FakeInstaller) -> None:
    with on_probation(world, installer) as agent:
        world.publish(trained(weights(), seed=5))
        assert agent.run_once()
        assert (only(agent).state, only(agent).version, only(agent).epoch) == ("PROBATION", "2", 3)
        world.clock.advance(seconds=61)
        agent.look()
        assert only(agent).next_try_s == 0  # nobody waits an interval for it
        assert agent.run_once()
        assert (only(agent).state, only(agent).active, only(agent).previous) == ("PROBATION", "3", "2")


def test_a_first_version_that_fails_leaves_the_model_to_the_cloud(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    with world.agent(installer, probation=LIMITS) as agent:
        assert agent.run_once()
        installer.measured["digits"] = vitals(0, 4, version="1"), None
        agent.look()
        status = only(agent)
        assert (status.state, status.active, installer.serving) == ("CLOUD_ONLY", None, {})
        world.publish(trained(weights()))
        assert agent.run_once()
        assert (only(agent).state, only(agent).active) == ("PROBATION", "2")


# --- restarts ---


def restarted(world: World, name: str = "node") -> tuple[Agent, FakeInstaller]:
    installer = FakeInstaller()
    agent = world.agent(installer, name, probation=LIMITS)
    agent.restore()
    return agent, installer


def test_a_process_that_does_not_stay_up_is_given_the_version_before(world: World, installer: FakeInstaller) -> None:
    on_probation(world, installer).close()
    for _ in range(2):
        agent, again = restarted(world)
        assert (again.serving, only(agent).state) == ({"digits": "2"}, "PROBATION")
        agent.close()
    agent, again = restarted(world)
    with agent:
        assert "was started 3 times" in only(agent).reason
        check_rolled_back(world, agent, again, "CRASHES")


def test_a_start_after_the_time_is_over_is_not_held_against_it(world: World, installer: FakeInstaller) -> None:
    on_probation(world, installer).close()
    world.clock.advance(seconds=61)
    for _ in range(4):
        agent, again = restarted(world)
        agent.close()
    agent, again = restarted(world)
    with agent:
        agent.look()
        assert (only(agent).state, again.serving) == ("COMMITTED", {"digits": "2"})


def test_polls_do_not_put_off_the_look(world: World, installer: FakeInstaller) -> None:
    with on_probation(world, installer) as agent:
        planned = agent._looks_at
        assert planned is not None
        world.clock.advance(seconds=0.1)
        assert agent.run_once()
        assert agent._looks_at == planned


def test_probation_goes_on_after_a_restart_and_opens_the_version_before_from_the_disk(
    world: World, installer: FakeInstaller
) -> None:
    on_probation(world, installer).close()
    agent, again = restarted(world)
    with agent:
        again.measured["digits"] = vitals(0, 9), None
        agent.look()
        assert again.calls == [(step, version) for version in "21" for step in ("prepare", "activate")]
        check_rolled_back(world, agent, again, "ERRORS")


@pytest.mark.parametrize("place", ["rolling back", "reverted"])
def test_a_crash_in_the_middle_of_a_rollback_does_not_bring_the_bad_version_back(
    world: World, installer: FakeInstaller, place: str
) -> None:
    def dies(name: str) -> None:
        if name == place:
            raise Killed

    agent = on_probation(world, installer)
    installer.measured["digits"] = vitals(0, 9), None
    with stopping(dies), pytest.raises(Killed):
        agent.look()
    agent.close()
    agent, again = restarted(world)
    with agent:
        check_rolled_back(world, agent, again, "ERRORS")


def test_a_version_before_that_is_damaged_leaves_the_model_to_the_cloud(world: World, installer: FakeInstaller) -> None:
    on_probation(world, installer).close()
    agent, again = restarted(world)
    with agent:
        damage(world.folder / "node/models/digits/1")
        again.measured["digits"] = vitals(0, 9), None
        agent.look()
        assert (only(agent).state, only(agent).active, again.serving) == ("CLOUD_ONLY", None, {})
    agent, again = restarted(world)
    with agent:
        assert again.serving == {}


def damage(folder: Path) -> None:
    path = next(folder.rglob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_thread_rolls_back_without_being_asked(world: World, installer: FakeInstaller) -> None:
    world.publish(weights())
    with world.agent(installer) as agent:
        assert agent.run_once()
    world.publish(trained(weights()))
    installer.measured["digits"] = vitals(0, 9), None
    with world.agent(installer, probation=LIMITS, clock=None) as agent:
        agent.start()
        end = time.monotonic() + 10
        while not world.events_of(Quarantined):
            assert time.monotonic() < end
            time.sleep(0.02)
        assert [event.version for event in world.events_of(Installed)] == ["1", "1", "2"]
        assert installer.serving == {"digits": "1"}
