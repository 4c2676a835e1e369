from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sync.agent.states import NEXT, Record, State, Step, check_move, decide
from sync.release import Desired


def desired(version: str = "2", epoch: int = 2) -> Desired:
    path = f"releases/digits/{version}.json"
    return Desired(
        model="digits", epoch=epoch, version=version, digest=version * 64, manifest=path, manifest_hash="f" * 64
    )


def record(state: State, version: str | None = "2", active: str | None = "1") -> Record:
    digest = None if version is None else version * 64
    return Record(model="digits", state=state, version=version, digest=digest, active=active)


def test_a_new_version_is_admitted() -> None:
    assert decide(record(State.IDLE, None, None), desired(), is_quarantined=False) is Step.ADMIT
    assert decide(record(State.COMMITTED, "1", "1"), desired(), is_quarantined=False) is Step.ADMIT


def test_what_is_committed_needs_nothing() -> None:
    assert decide(record(State.COMMITTED, "2", "2"), desired(), is_quarantined=False) is Step.NOTHING


def test_an_interrupted_fetch_goes_on_and_a_staged_release_is_built() -> None:
    for state in (State.ADMITTED, State.WAITING, State.FETCHING):
        assert decide(record(state), desired(), is_quarantined=False) is Step.FETCH
    for state in (State.STAGED, State.BUILDING, State.GATED):
        assert decide(record(state), desired(), is_quarantined=False) is Step.BUILD


@pytest.mark.parametrize("state", sorted(set(State) - {State.PROBATION, State.ROLLING_BACK}))
def test_rollout_case_16_a_newer_version_supersedes_at_any_point_before_probation(state: State) -> None:
    assert decide(record(state), desired("3", 3), is_quarantined=False) is Step.ADMIT


@pytest.mark.parametrize("state", [State.PROBATION, State.ROLLING_BACK])
def test_nothing_begins_while_a_version_is_on_probation(state: State) -> None:
    assert decide(record(state, active="2"), desired("3", 3), is_quarantined=False) is Step.WATCH


def test_a_refused_content_is_refused_again_without_a_fetch() -> None:
    assert decide(record(State.COMMITTED, "1", "1"), desired(), is_quarantined=True) is Step.REFUSE
    assert decide(record(State.QUARANTINED), desired(), is_quarantined=True) is Step.NOTHING


def test_a_return_to_what_serves_fetches_nothing() -> None:
    assert decide(record(State.QUARANTINED), desired("1", 3), is_quarantined=False) is Step.ADOPT


@given(
    state=st.sampled_from(State),
    version=st.sampled_from([None, "1", "2", "3"]),
    active=st.sampled_from([None, "1", "2"]),
    is_quarantined=st.booleans(),
)
def test_every_step_leads_along_an_allowed_transition(
    state: State, version: str | None, active: str | None, is_quarantined: bool
) -> None:
    one = record(state, version, active)
    step = decide(one, desired(), is_quarantined=is_quarantined)
    targets = {
        Step.ADMIT: (State.ADMITTED,),
        Step.FETCH: (State.FETCHING, State.WAITING),
        Step.BUILD: (State.BUILDING, State.WAITING, State.FETCHING),
        Step.REFUSE: (State.QUARANTINED, State.CLOUD_ONLY),
        Step.ADOPT: (State.COMMITTED,),
    }
    for target in targets.get(step, ()):
        check_move(state, target)
    if step in (Step.ADMIT, Step.FETCH, Step.BUILD):
        assert not is_quarantined


def test_each_state_follows_the_one_before_on_the_way_to_service() -> None:
    way = [State.IDLE, State.ADMITTED, State.WAITING, State.FETCHING, State.STAGED, State.BUILDING, State.GATED]
    way += [State.PROBATION, State.ROLLING_BACK, State.QUARANTINED, State.ADMITTED]
    for old, new in pairwise(way):
        check_move(old, new)
    check_move(State.PROBATION, State.COMMITTED)
    check_move(State.ROLLING_BACK, State.CLOUD_ONLY)


def test_transitions_that_skip_a_proof_are_bugs() -> None:
    for old, new in (
        (State.FETCHING, State.GATED),
        (State.IDLE, State.STAGED),
        (State.QUARANTINED, State.STAGED),
        (State.ADMITTED, State.STAGED),
        (State.STAGED, State.PROBATION),
        (State.PROBATION, State.ADMITTED),
        (State.PROBATION, State.QUARANTINED),
    ):
        with pytest.raises(AssertionError):
            check_move(old, new)
    assert set(NEXT) == set(State)
    assert replace(record(State.IDLE), state=State.FETCHING).state is State.FETCHING
