from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from sync.agent.schedule import PollSchedule


def schedule(interval_s: float = 900.0, min_gap_s: float = 1.0, seed: int = 0) -> PollSchedule:
    return PollSchedule(interval_s, min_gap_s, random.Random(seed))


def test_the_first_poll_is_due_at_once() -> None:
    assert schedule().next_at == 0.0


@given(seed=st.integers(0, 1000))
def test_polls_come_each_interval_give_or_take_a_tenth(seed: int) -> None:
    one = schedule(seed=seed)
    one.done(100.0, is_ok=True)
    assert 910.0 <= one.next_at <= 1090.0


def test_failures_back_off_up_to_the_interval() -> None:
    one, delays = schedule(), []
    for _ in range(20):
        one.done(0.0, is_ok=False)
        delays.append(one.next_at)
    assert 0.5 <= delays[0] <= 1.0
    assert 450.0 <= delays[-1] <= 900.0


def test_after_an_outage_the_phase_is_drawn_anew() -> None:
    """Ten thousand nodes come back together; a tenth of an interval later they must not."""
    at = []
    for seed in range(10_000):
        one = schedule(seed=seed)
        one.done(0.0, is_ok=False)
        one.done(1000.0, is_ok=True)
        at.append(one.next_at - 1000.0)
    bins = [sum(i * 90 <= x < (i + 1) * 90 for x in at) for i in range(10)]
    assert max(bins) / (sum(bins) / 10) < 1.3


def test_a_hint_moves_the_poll_forward_but_never_back() -> None:
    one = schedule()
    one.done(0.0, is_ok=True)
    one.hint(100.0, 0.0)
    assert one.next_at == 100.0
    one.hint(200.0, 0.0)
    assert one.next_at == 100.0


def test_hints_are_rate_limited() -> None:
    one = schedule(min_gap_s=5.0)
    one.done(10.0, is_ok=True)
    for _ in range(100):
        one.hint(10.1, 0.0)
    assert one.next_at == 15.0


@given(seed=st.integers(0, 1000), spread_s=st.floats(0, 1e9))
def test_a_hint_spreads_nodes_but_never_beyond_the_interval(seed: int, spread_s: float) -> None:
    one = schedule(seed=seed)
    one.done(0.0, is_ok=True)
    one.hint(10.0, spread_s)
    assert one.next_at <= 10.0 + min(spread_s, 900.0)


def test_a_hint_during_a_poll_asks_for_another() -> None:
    one = schedule(min_gap_s=2.0)
    one.begin()
    one.hint(10.0, 0.0)
    one.done(11.0, is_ok=True)
    assert one.next_at == 13.0
    one.begin()
    one.done(14.0, is_ok=True)
    assert one.next_at > 800.0
