"""Every sync that the agent asks for, by what it is good for; and what happens without it.

To leave one out of the replay is to leave it out of the program: a sync changes nothing that a running process sees.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.power.check import Outcome, run
from tests.power.log import Entry, Op
from tests.power.record import Recording

_NODE: Final = "state/node"
_AFTER: Final = (4, 12, 40)  # calls after a sync among which the power goes
EMPTY: Final = "SQLite: the journal while it is made"
_PLACES: Final = (  # path; only fdatasync; name
    (r"|state", False, "folders on the way to the node's own"),
    (rf"{_NODE}/journal\.db-journal", True, EMPTY),
    (rf"{_NODE}/journal\.db-wal", True, "SQLite: each transaction (synchronous=FULL)"),
    (rf"{_NODE}/journal\.db", True, "SQLite: what a checkpoint copies into the journal"),
    (rf"{_NODE}", True, "SQLite: names of the journal's files"),
    (rf"{_NODE}/staging/[^/]+/[^/]+/.*\.\w+", False, "files of a release"),
    (rf"{_NODE}/staging/[^/]+/[^/]+", False, "folder of a release"),
    (rf"{_NODE}/staging/[^/]+/[^/]+/.+", False, "folders inside it"),
    (rf"{_NODE}/models/[^/]+", False, "models/MODEL: the name of a release"),
    (rf"{_NODE}/models", False, "models: the name of a model"),
    (rf"{_NODE}/current", False, "current: the link"),
    (rf"{_NODE}/tuf/targets/\.tmp-.*", False, "a manifest that is cached"),
    (rf"{_NODE}/tuf/targets", False, "the name of a manifest that is cached"),
)
_OF_NODE: Final = {"models": "node folder: the name of models", "current": "node folder: the name of current"}

# What no crash image misses, and why it is there all the same.
HARMLESS: Final = {
    EMPTY: "nothing was promised yet: a torn journal is set aside and begun anew",
    "a manifest that is cached": "a cache: held against its signed hash, and fetched again",
    "the name of a manifest that is cached": "a cache: held against its signed hash, and fetched again",
}


def sites(entries: Sequence[Entry]) -> list[str | None]:
    """For each entry the name of the sync that it is; None for other calls. Raises `ValueError` for an unknown one."""
    found: list[str | None] = []
    last = ""
    for entry in entries:
        found.append(_site(entry, last) if entry.op is Op.SYNC else None)
        last = entry.path if entry.op is Op.SYNC else last
    return found


def _site(entry: Entry, last: str) -> str:
    if entry.path == _NODE and not entry.only_data:
        return _OF_NODE[last.removeprefix(f"{_NODE}/")]
    for path, only_data, name in _PLACES:
        if entry.only_data == only_data and re.fullmatch(path, entry.path):
            return name
    raise ValueError(f"{entry.path!r} is synced, and nothing here says what for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """What came of leaving out one of them, `calls` times."""

    name: str
    calls: int
    outcome: Outcome


def without(recording: Recording, name: str, *, count: int, seed: int) -> Missed:
    """Ends with the first image that is no good."""
    rng, found = random.Random(seed), sites(recording.entries)
    calls = [number for number, site in enumerate(found) if site == name]
    first = calls[: 1 + len(calls) // 10]  # where names are new
    chosen = rng.choices(first, k=count // 4) + rng.choices(calls, k=count // 4)
    soon = [min(len(found), number + rng.randint(1, rng.choice(_AFTER))) for number in chosen]
    late = rng.choices([point for point in recording.after if point > calls[0]] or [len(found)], k=count - len(soon))
    gone = {id(recording.entries[number]) for number in calls}
    outcome = run(recording, at=sorted(soon + late), rng=rng, dropped=lambda entry: id(entry) in gone, stop_early=True)
    return Missed(name=name, calls=len(calls), outcome=outcome)


def each(recordings: Sequence[Recording], *, count: int, seed: int) -> Iterator[Missed]:
    """By name, in the order in which the agent comes to them: what the first recording that misses it shows."""
    names = [name for one in recordings for name in sites(one.entries) if name is not None]
    for name in dict.fromkeys(names):
        images = 0
        for recording in recordings:
            missed = without(recording, name, count=count, seed=seed)
            images = missed.outcome.images = images + missed.outcome.images
            if missed.outcome.problems:
                break
        yield missed
