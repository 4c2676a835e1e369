"""The pool's rules, on a clock that is an argument."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cloud.pool import COOL_OFF_S, MAX_MISSED, Member, Pool
from common.errors import ModelNotFound, ModelNotReady, Unavailable, VersionNotFound
from common.request import Priority
from common.serving.catalog import ModelState, ModelStatus


def status(name: str = "m", version: str = "1", state: ModelState = ModelState.READY, reason: str = "") -> ModelStatus:
    return ModelStatus(name=name, version=version, state=state, reason=reason)


def pool_of(*indexes: list[ModelStatus] | None) -> Pool:
    """A pool with a member per index; None: not healthy."""
    members = tuple(Member(address=f"w{i}") for i in range(len(indexes)))
    pool = Pool(members, rng=random.Random(1))
    for member, index in zip(members, indexes, strict=True):
        pool.observed(member, is_ready=index is not None, index=index or ())
    return pool


def picks(pool: Pool, now: float, times: int = 300) -> Counter[str]:
    return Counter(pool.pick("m", None, now).address for _ in range(times))


def test_idle_members_share_the_calls() -> None:
    counts = picks(pool_of([status()], [status()], [status()]), 0.0)
    assert set(counts) == {"w0", "w1", "w2"}
    assert min(counts.values()) > 60


def test_of_two_the_one_with_less_in_flight_is_picked() -> None:
    pool = pool_of([status()], [status()])
    pool.members[0].in_flight = 3
    assert set(picks(pool, 0.0)) == {"w1"}


def test_in_flight_stays_balanced_when_calls_do_not_end() -> None:
    pool = pool_of(*[[status()]] * 5)
    for _ in range(500):
        pool.pick("m", None, 0.0).in_flight += 1
    loads = [member.in_flight for member in pool.members]
    assert max(loads) - min(loads) <= 4


def test_a_member_that_broke_is_avoided_until_it_has_cooled_off() -> None:
    pool = pool_of([status()], [status()])
    pool.members[1].in_flight = 9  # the broken one would look best: nothing in flight
    pool.broke(pool.members[0], now=10.0)
    assert set(picks(pool, 10.0)) == {"w1"}
    assert set(picks(pool, 10.0 + COOL_OFF_S - 0.01)) == {"w1"}
    assert set(picks(pool, 10.0 + COOL_OFF_S)) == {"w0"}


def test_the_longer_cool_off_stands() -> None:
    pool = pool_of([status()], [status()])
    pool.broke(pool.members[0], now=10.0)
    pool.broke(pool.members[0], now=5.0)
    assert pool.members[0].cool_until == 10.0 + COOL_OFF_S


def test_a_member_that_asked_for_a_pause_gets_no_call_of_that_class_or_below_before() -> None:
    pool = pool_of([status()], [status()])
    busy = Unavailable("full", retry_after_s=1.0)
    pool.refused(pool.members[0], "m", Priority.INTERACTIVE, busy, now=10.0)
    assert set(picks(pool, 10.99)) == {"w1"}
    pool.refused(pool.members[1], "m", Priority.INTERACTIVE, Unavailable("full", retry_after_s=3.0), now=10.0)
    with pytest.raises(Unavailable, match="pause") as caught:
        pool.pick("m", None, 10.6)
    assert caught.value.retry_after_s == pytest.approx(0.4)
    with pytest.raises(Unavailable, match="pause"):
        pool.pick("m", None, 10.6, priority=Priority.OFFLINE)
    assert pool.pick("m", None, 10.6, priority=Priority.REALTIME).address in {"w0", "w1"}  # goes before what is queued
    pool.refused(pool.members[0], "m", Priority.INTERACTIVE, Unavailable("full", retry_after_s=0.1), now=10.0)
    assert set(picks(pool, 11.0)) == {"w0"}  # the longer one stood, and is over
    assert set(picks(pool, 13.0)) == {"w0", "w1"}


def test_a_cooling_member_is_still_better_than_none() -> None:
    pool = pool_of([status()], None)
    pool.broke(pool.members[0], now=10.0)
    assert pool.pick("m", None, 10.0).address == "w0"


def test_a_pinned_version_goes_to_a_member_that_has_it() -> None:
    pool = pool_of([status(version="1")], [status(version="2")])
    assert {pool.pick("m", "2", 0.0).address for _ in range(20)} == {"w1"}
    with pytest.raises(VersionNotFound, match="versions served: 1, 2"):
        pool.pick("m", "3", 0.0)


def test_a_model_goes_to_a_member_that_serves_it() -> None:
    pool = pool_of([status("other")], [status(), status("other")])
    assert set(picks(pool, 0.0, 20)) == {"w1"}


def test_what_nobody_serves_says_why() -> None:
    pool = pool_of([status("built", state=ModelState.BUILDING, reason="version 2")], [status("other")], None)
    with pytest.raises(ModelNotFound, match="known models: built, other"):
        pool.pick("m", None, 0.0)
    with pytest.raises(ModelNotReady, match="version 2"):
        pool.pick("built", None, 0.0)
    with pytest.raises(ModelNotReady, match="version 2"):
        pool.pick("built", "1", 0.0)
    with pytest.raises(Unavailable, match="no other worker"):
        pool.pick("other", None, 0.0, avoid=[pool.members[1]])


def test_no_healthy_member_is_unavailable_even_for_an_unknown_model() -> None:
    with pytest.raises(Unavailable, match="no worker") as caught:
        pool_of(None, None).pick("m", None, 0.0)
    assert caught.value.retry_after_s >= 1


def test_a_late_probe_does_not_make_a_member_unhealthy_but_a_row_of_them_does() -> None:
    pool = pool_of([status()])
    member = pool.members[0]
    assert [pool.missed(member) for _ in range(MAX_MISSED)] == [False] * (MAX_MISSED - 1) + [True]
    assert not member.is_healthy
    assert pool.observed(member, is_ready=True, index=[status()])
    assert not pool.missed(member)
    assert member.is_healthy


def test_the_index_is_the_union_in_the_best_state() -> None:
    pool = pool_of(
        [status("m", "1", ModelState.UNAVAILABLE), status("n", "1")],
        [status("m", "1"), status("m", "2", ModelState.BUILDING)],
        None,
    )
    assert [(s.name, s.version, s.state) for s in pool.index()] == [
        ("m", "1", ModelState.READY),
        ("m", "2", ModelState.BUILDING),
        ("n", "1", ModelState.READY),
    ]
