from __future__ import annotations

from dataclasses import replace

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


def test_a_new_version_is_fetched() -> None:
    assert decide(record(State.IDLE, None, None), desired(), is_quarantined=False) is Step.FETCH
    assert decide(record(State.COMMITTED, "1", "1"), desired(), is_quarantined=False) is Step.FETCH


def test_what_is_committed_needs_nothing() -> None:
    assert decide(record(State.COMMITTED, "2", "2"), desired(), is_quarantined=False) is Step.NOTHING


def test_an_interrupted_fetch_goes_on_and_a_staged_release_is_built() -> None:
    assert decide(record(State.FETCHING), desired(), is_quarantined=False) is Step.FETCH
    assert decide(record(State.STAGED), desired(), is_quarantined=False) is Step.BUILD
    assert decide(record(State.GATED), desired(), is_quarantined=False) is Step.BUILD


@pytest.mark.parametrize("state", [State.FETCHING, State.STAGED, State.GATED, State.QUARANTINED])
def test_a_newer_version_supersedes_at_any_point(state: State) -> None:
    assert decide(record(state), desired("3", 3), is_quarantined=False) is Step.FETCH


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
    target = {Step.FETCH: State.FETCHING, Step.REFUSE: State.QUARANTINED, Step.ADOPT: State.COMMITTED}.get(step)
    if target is not None:
        check_move(state, target)
    if step is Step.BUILD:
        check_move(State.STAGED, State.GATED)
        assert not is_quarantined


def test_transitions_that_skip_a_proof_are_bugs() -> None:
    for old, new in ((State.FETCHING, State.GATED), (State.IDLE, State.STAGED), (State.QUARANTINED, State.STAGED)):
        with pytest.raises(AssertionError):
            check_move(old, new)
    assert set(NEXT) == set(State)
    assert replace(record(State.IDLE), state=State.FETCHING).state is State.FETCHING
