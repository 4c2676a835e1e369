"""The agent's rules, without I/O: which state may follow which, and what to do about a desired state.

IDLE -> FETCHING -> STAGED -> GATED -> COMMITTED
any of the middle ones -> QUARANTINED (this content is refused) or FETCHING (a newer one is desired)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sync.release import Desired


class State(StrEnum):
    IDLE = "IDLE"  # nothing was ever installed, or what was is damaged
    FETCHING = "FETCHING"  # slabs are being fetched into the staging folder
    STAGED = "STAGED"  # every file is verified, synced and at its final place
    GATED = "GATED"  # the golden set passed on the engine built here
    COMMITTED = "COMMITTED"  # it serves; older ones may be removed
    QUARANTINED = "QUARANTINED"  # refused, with a reason; what served before goes on


# A newer desired state may come at any point (FETCHING); damage found on the disk leads back to IDLE.
NEXT: Final = {
    State.IDLE: {State.FETCHING, State.COMMITTED, State.QUARANTINED, State.IDLE},
    State.FETCHING: {State.FETCHING, State.STAGED, State.COMMITTED, State.QUARANTINED, State.IDLE},
    State.STAGED: {State.FETCHING, State.GATED, State.COMMITTED, State.QUARANTINED, State.IDLE},
    State.GATED: {State.FETCHING, State.GATED, State.COMMITTED, State.QUARANTINED, State.IDLE},
    State.COMMITTED: {State.FETCHING, State.COMMITTED, State.QUARANTINED, State.IDLE},
    State.QUARANTINED: {State.FETCHING, State.COMMITTED, State.QUARANTINED, State.IDLE},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One model in the journal. `version` and `digest` belong to `state`; `active` is what serves."""

    model: str
    state: State = State.IDLE
    version: str | None = None
    digest: str | None = None
    reason: str = ""
    attempts: int = 0  # builds begun for this target, crashes included
    active: str | None = None
    previous: str | None = None
    desired: Desired | None = None  # the last one that was believed: the floor of the epoch


class Step(StrEnum):
    """What to do next for one model."""

    NOTHING = "nothing"
    REFUSE = "refuse"  # it is in quarantine: fetch nothing
    FETCH = "fetch"
    BUILD = "build"  # the files are here: prepare, gate, activate
    ADOPT = "adopt"  # it serves already: only say so


def decide(record: Record, desired: Desired, *, is_quarantined: bool) -> Step:
    """The next step towards `desired`, whose epoch has been checked. Pure: asked again after every crash."""
    is_target = record.version == desired.version and record.digest == desired.digest
    if record.active == desired.version:
        return Step.NOTHING if is_target and record.state is State.COMMITTED else Step.ADOPT
    if is_quarantined:
        return Step.NOTHING if is_target and record.state is State.QUARANTINED else Step.REFUSE
    if is_target and record.state in (State.STAGED, State.GATED):
        return Step.BUILD
    return Step.FETCH


def check_move(old: State, new: State) -> None:
    if new not in NEXT[old]:
        raise AssertionError(f"no transition {old} -> {new}")
