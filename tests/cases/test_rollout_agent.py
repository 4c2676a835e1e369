"""Cases of rollouts that users of other systems reported: the agent's own, without a model server around it.

Those that belong to one file of the agent stand in that file's tests; `test_numbers.py` knows that none is missing.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from sync.agent.schedule import PollSchedule
from sync.agent.steps import MAX_ATTEMPTS
from sync.hints import Hint
from sync.store import TIMESTAMP
from tests.sync.fakes import FakeClock, FakeInstaller, World, trained, weights

NODES, INTERVAL_S, BIN_S = 10_000, 900.0, 10.0


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, FakeClock())


def test_rollout_case_9_every_poll_asks_for_the_timestamp_long_before_it_expires(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(weights())
    asked: Counter[str] = Counter()
    read = world.source.read

    def counted(name: str) -> object:
        asked[name] += 1
        return read(name)

    monkeypatch.setattr(world.source, "read", counted)
    with world.agent(FakeInstaller()) as agent:
        for number in range(1, 6):
            assert agent.run_once()
            assert asked[TIMESTAMP] == number


def polls(outage: tuple[float, float], until: float) -> list[float]:
    """When each of the nodes polls, in virtual time: they were started over one interval, polls of an outage fail."""
    at = []
    for seed in range(NODES):
        rng = random.Random(seed)
        one, now = PollSchedule(INTERVAL_S, 1.0, rng), rng.uniform(0.0, INTERVAL_S)
        while now < until:
            at.append(now)
            one.begin()
            one.done(now, is_ok=not outage[0] <= now < outage[1])
            now = one.next_at
    return at


def peak_over_mean(at: list[float], start: float, end: float) -> float:
    bins = Counter(int((one - start) // BIN_S) for one in at if start <= one < end)
    return max(bins.values()) / (sum(bins.values()) / ((end - start) / BIN_S))


def test_rollout_case_11_an_outage_of_half_an_hour_leaves_no_echo() -> None:
    start, end = 3000.0, 4800.0
    at = polls((start, end), end + 5 * INTERVAL_S)
    usual = NODES / INTERVAL_S * BIN_S
    after = Counter(int((one - end) // BIN_S) for one in at if one >= end)
    assert max(after.values()) < 3 * usual  # the return itself is no storm
    for interval in range(1, 5):  # and no interval after it has a peak
        first = end + interval * INTERVAL_S
        assert peak_over_mean(at, first, min(first + INTERVAL_S, end + 5 * INTERVAL_S)) < 1.4


def test_rollout_case_12_a_hint_spreads_the_fleet_evenly_over_its_window() -> None:
    window_s, at = 300.0, []
    for seed in range(NODES):
        one = PollSchedule(INTERVAL_S, 1.0, random.Random(seed))
        one.begin()
        one.done(-600.0, is_ok=True)
        one.next_at = INTERVAL_S  # whenever the poll is due by itself, it is not before the window's end
        one.hint(0.0, window_s)
        at.append(one.next_at)
    assert peak_over_mean(at, 0.0, window_s) <= 1.3
    assert max(at) <= window_s


def test_rollout_case_13_a_retained_hint_of_long_ago_moves_nothing(world: World) -> None:
    world.publish(weights())
    world.publish(trained(weights()))
    installer = FakeInstaller()
    with world.agent(installer) as agent:
        assert agent.run_once()
        seen = agent._timestamp_seen
        due_s = agent.status()[0].next_try_s
        for version in range(seen + 1):
            agent.hint(Hint(timestamp_version=version, spread_ms=0))
            assert agent.status()[0].next_try_s == due_s
        agent.hint(Hint(timestamp_version=seen + 1, spread_ms=0))  # a rumour of something newer causes one poll,
        assert agent.status()[0].next_try_s <= agent.config.min_gap_s
        assert agent.run_once()
    assert installer.serving == {"digits": "2"}  # which finds what is signed, not what was said


class Hanging(FakeInstaller):
    """Its builder never comes back for the versions in `stuck`, until it is let go."""

    def __init__(self, *stuck: str) -> None:
        super().__init__()
        self.stuck, self.go = stuck, threading.Event()

    def prepare(self, staged: object) -> object:
        prepared = super().prepare(staged)  # type: ignore[arg-type]
        if prepared.model == "digits" and prepared.version in self.stuck:
            self.go.wait(30)
        return prepared


def test_rollout_case_16_a_builder_that_hangs_holds_up_neither_other_models_nor_the_next_version(world: World) -> None:
    installer = Hanging("1")
    world.publish(weights())
    world.publish(weights(3), model="other")
    with world.agent(installer, build_timeout_s=0.1) as agent:
        assert not agent.run_once()
        assert installer.serving == {"other": "1"}
        status = next(one for one in agent.status() if one.model == "digits")
        assert (status.state, status.code) == ("BUILDING", "BUILD_FAILED")
        assert "was given up after 0.1 s" in status.reason
        world.publish(trained(weights()))
        assert agent.run_once()
        assert installer.serving == {"other": "1", "digits": "2"}
        installer.go.set()
        end = time.monotonic() + 10
        while "1" not in installer.discarded and time.monotonic() < end:
            time.sleep(0.01)
        assert installer.discarded == ["1"]  # what came to be after all is not kept open
        assert installer.serving["digits"] == "2"


def test_rollout_case_16_a_builder_that_always_hangs_is_given_up_for_good(world: World) -> None:
    installer = Hanging("1")
    world.publish(weights())
    with world.agent(installer, build_timeout_s=0.05) as agent:
        for _ in range(MAX_ATTEMPTS):
            assert not agent.run_once()
        assert agent.run_once()
        (status,) = agent.status()
        assert (status.state, status.code) == ("CLOUD_ONLY", "BUILD_FAILED")
        installer.go.set()
