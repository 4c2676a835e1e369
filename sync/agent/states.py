"""The agent's rules, without I/O: which state may follow which, and what to do about a desired state.

IDLE -> ADMITTED [-> WAITING] -> FETCHING -> STAGED -> BUILDING -> GATED -> PROBATION -> COMMITTED
before PROBATION: -> ADMITTED (another one is desired), or QUARANTINED (this content is refused)
PROBATION: -> ROLLING_BACK -> QUARANTINED; CLOUD_ONLY where nothing good is left on this node
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sync.release import Desired


class State(StrEnum):
    IDLE = "IDLE"  # nothing was ever installed, or what was is damaged
    ADMITTED = "ADMITTED"  # this node can run it, and its space is reserved
    WAITING = "WAITING"  # for `not_before`, or for what `code` says
    FETCHING = "FETCHING"  # slabs are being fetched into the staging folder
    STAGED = "STAGED"  # every file is verified, synced and at its final place
    BUILDING = "BUILDING"  # an engine is made beside the one that serves
    GATED = "GATED"  # the golden set passed on the engine built here
    PROBATION = "PROBATION"  # it serves and is watched; the one before is kept ready
    COMMITTED = "COMMITTED"  # it serves; older ones may be removed
    ROLLING_BACK = "ROLLING_BACK"  # the one before is `active` again, and has to serve
    QUARANTINED = "QUARANTINED"  # refused, with a reason; what served before goes on
    CLOUD_ONLY = "CLOUD_ONLY"  # refused, and nothing else is here: the cloud serves


class Code(StrEnum):
    """Why a model is where it is, for programs; `reason` has it in words."""

    NONE = ""
    NEW = "NEW"  # newly desired: on its way
    SERVES = "SERVES"  # what is desired serves
    WINDOW = "WINDOW"  # outside the maintenance window
    DISK_FULL = "DISK_FULL"  # no space to reserve, or none to write
    CLOCK = "CLOCK"  # this node's clock is behind what is signed: nothing is installed
    NETWORK = "NETWORK"  # the source does not answer, or breaks off
    SOURCE = "SOURCE"  # the source has not what signed metadata names, or damaged
    NOT_READY = "NOT_READY"  # the engine cannot be used now: no fault of the release
    NO_VARIANT = "NO_VARIANT"  # nothing in the release runs here
    BAD_RELEASE = "BAD_RELEASE"  # what is signed makes no sense
    BUILD_FAILED = "BUILD_FAILED"
    GATE_FAILED = "GATE_FAILED"
    ERRORS = "ERRORS"  # in probation: too many calls failed
    LATENCY = "LATENCY"  # in probation: too slow
    CRASHES = "CRASHES"  # in probation: the process did not stay up
    DAMAGED = "DAMAGED"  # files on this node's disk
    RESTART = "RESTART"  # a start that found it half done


_REFUSED: Final = {State.QUARANTINED, State.CLOUD_ONLY}
# Before anything serves, whatever is desired next may come (ADMITTED), what is here may be refused, adopted or found
# damaged (IDLE).
_OPEN: Final = {State.ADMITTED, State.COMMITTED, State.IDLE} | _REFUSED
NEXT: Final = {
    State.IDLE: _OPEN,
    State.ADMITTED: _OPEN | {State.WAITING, State.FETCHING},
    State.WAITING: _OPEN | {State.WAITING, State.FETCHING},
    State.FETCHING: _OPEN | {State.WAITING, State.FETCHING, State.STAGED},
    State.STAGED: _OPEN | {State.WAITING, State.FETCHING, State.BUILDING},
    State.BUILDING: _OPEN | {State.WAITING, State.FETCHING, State.BUILDING, State.GATED},
    State.GATED: _OPEN | {State.WAITING, State.FETCHING, State.BUILDING, State.PROBATION},
    State.PROBATION: {State.PROBATION, State.COMMITTED, State.ROLLING_BACK, State.IDLE},
    State.ROLLING_BACK: {State.ROLLING_BACK, State.IDLE} | _REFUSED,
    State.COMMITTED: _OPEN,
    State.QUARANTINED: _OPEN,
    State.CLOUD_ONLY: _OPEN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One model in the journal. `version` and `digest` belong to `state`; `active` is what serves."""

    model: str
    state: State = State.IDLE
    version: str | None = None
    digest: str | None = None
    code: Code = Code.NONE
    reason: str = ""
    attempts: int = 0  # builds begun for this target, crashes included
    starts: int = 0  # of the process, in this probation
    not_before: float | None = None  # WAITING: seconds since 1970
    deadline: float | None = None  # PROBATION: seconds since 1970
    active: str | None = None
    previous: str | None = None
    desired: Desired | None = None  # the last one that was believed: the floor of the epoch


class Step(StrEnum):
    """What to do next for one model."""

    NOTHING = "nothing"
    WATCH = "watch"  # it is on probation: nothing else begins
    REFUSE = "refuse"  # it is in quarantine: fetch nothing
    ADMIT = "admit"  # take it on
    FETCH = "fetch"  # it was taken on
    BUILD = "build"  # the files are here: prepare, gate, activate
    ADOPT = "adopt"  # it serves already: only say so


def decide(record: Record, desired: Desired, *, is_quarantined: bool) -> Step:
    """The next step towards `desired`, whose epoch has been checked. Pure: asked again after every crash."""
    is_target = record.version == desired.version and record.digest == desired.digest
    if record.state in (State.PROBATION, State.ROLLING_BACK):
        return Step.WATCH
    if record.active == desired.version:
        return Step.NOTHING if is_target and record.state is State.COMMITTED else Step.ADOPT
    if is_quarantined:
        return Step.NOTHING if is_target and record.state in _REFUSED else Step.REFUSE
    if is_target and record.state in (State.STAGED, State.BUILDING, State.GATED):
        return Step.BUILD
    if is_target and record.state in (State.ADMITTED, State.WAITING, State.FETCHING):
        return Step.FETCH
    return Step.ADMIT


def check_move(old: State, new: State) -> None:
    if new not in NEXT[old]:
        raise AssertionError(f"no transition {old} -> {new}")
