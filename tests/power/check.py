"""What has to hold of a node after a power loss, whatever its disk has kept.

Before anybody runs, the link leads to a whole, signed release that was allowed to serve. The agent, without a network,
serves what it said was durable, and still has the version before that. With a network it arrives at what is desired.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

from common.errors import FetchError
from sync.agent import Agent
from sync.agent.agent import ModelStatus
from sync.agent.links import LinkInstaller
from sync.events import ignore
from tests.power.disk import Disk, Image, write_image
from tests.power.log import Entry, Op
from tests.power.node import VARIANT
from tests.power.record import LIFE_S, MODEL, Mark, Recording, files_of
from tests.sync.fakes import FakeClock, StoreSource

_REFUSED: Final = ("QUARANTINED", "CLOUD_ONLY")
_STAGED: Final = ("STAGED", "BUILDING", "GATED")  # every file is at its place
_LATER_S: Final = 20 * LIFE_S


@dataclass
class Outcome:
    images: int = 0
    kept: int = 0  # versions that had to be there, and were: the one that serves and the one before
    problems: list[str] = field(default_factory=list)


Dropped = Callable[[Entry], bool]  # a sync that is left out


def nothing(entry: Entry) -> bool:
    return False


def points(recording: Recording, rng: random.Random, count: int) -> list[int]:
    """Where the power goes: half of them anywhere, half just when something was promised. In order."""
    anywhere = [rng.randint(0, len(recording.entries)) for _ in range(count // 2)]
    return sorted(anywhere + [rng.choice(recording.after) for _ in range(count - count // 2)])


def images(
    recording: Recording, at: Iterable[int], rng: random.Random, dropped: Dropped
) -> Iterator[tuple[int, Image]]:
    """One for each point, which are in order."""
    disk, done = Disk(), 0
    for point in at:
        for entry in recording.entries[done:point]:
            if entry.op is not Op.SYNC or not dropped(entry):
                disk.apply(entry)
        done = point
        yield point, disk.after_power_loss(rng)


def sample(recording: Recording, *, count: int, seed: int) -> Outcome:
    rng = random.Random(seed)
    return run(recording, at=points(recording, rng, count), rng=rng)


def run(
    recording: Recording,
    *,
    at: Sequence[int],
    rng: random.Random,
    dropped: Dropped = nothing,
    stop_early: bool = False,
) -> Outcome:
    """The power goes at each of the points `at`, which are in order."""
    outcome = Outcome()
    with _aside(recording):
        for point, image in images(recording, at, rng, dropped):
            check = _Check(recording, *recording.said(point))
            found = check.run(image)
            outcome.images += 1
            outcome.kept += check.kept
            outcome.problems += [f"image {outcome.images} (after {point} calls): {problem}" for problem in found]
            if found and stop_early:
                break
    return outcome


@contextmanager
def _aside(recording: Recording) -> Iterator[None]:
    """Makes room where the disk was: links have absolute targets."""
    aside, level = recording.disk.with_suffix(".recorded"), logging.root.manager.disable
    recording.disk.rename(aside)
    logging.disable(logging.CRITICAL)  # every offline poll would say so
    try:
        yield
    finally:
        logging.disable(level)
        shutil.rmtree(recording.disk, ignore_errors=True)
        aside.rename(recording.disk)


class _Check:
    """Of one image. `before`: what had been said; `after`: what was said next, and may be true already."""

    def __init__(self, recording: Recording, before: Mark, after: Mark) -> None:
        self._recording, self._before, self._after = recording, before, after
        self._link = recording.node / "current" / MODEL
        self.kept = 0

    def run(self, image: Image) -> list[str]:
        shutil.rmtree(self._recording.disk, ignore_errors=True)
        write_image(image, self._recording.disk)
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from self._problems_of_link(self._allowed(), "at first")
        source, clock = StoreSource(self._recording.world.store), FakeClock()
        clock.advance(seconds=_LATER_S)
        source.error = FetchError("power", "the network is not up yet")
        installer = LinkInstaller(self._recording.node / "current", (VARIANT,))
        try:
            agent = self._recording.world.agent(
                installer, str(self._recording.node), models=(MODEL,), source=source, clock=clock, on_event=ignore
            )
        except Exception as exc:  # whatever it is, the node is lost
            yield f"the agent does not come up: {type(exc).__name__}: {exc}"
            return
        with agent:
            yield from self._problems_of_journal(agent)
            agent.restore()
            yield from self._problems_offline(agent)
            agent.look()
            agent.run_once()
            if self._version() != _status(agent).active:
                yield f"without a network: {self._version()} is linked, {_status(agent).active} is active"
            source.error = None
            yield from self._problems_online(agent)

    def _allowed(self) -> set[str | None]:
        """The link is set just before the journal says so, and back just after."""
        said = (self._before, self._after)
        versions = {mark.active for mark in said}
        return versions | {mark.version for mark in said if mark.state not in _REFUSED}

    def _problems_of_journal(self, agent: Agent) -> Iterator[str]:
        status = _status(agent)
        found = (str(status.state), status.version, status.active, status.previous)
        said = [mark.place for mark in (self._before, self._after)]
        if found not in said:
            yield f"the journal has {found}, allowed: {said}"
        if status.state in _STAGED:
            yield from self._damage(str(status.version), status.state)
        floors = agent._journal.floors()
        lost = [role for role, version in self._before.floors.items() if floors.get(role, 0) < version]
        if lost or (status.epoch or 0) < self._before.epoch:
            yield f"the journal has epoch {status.epoch} and floors {floors}, said was {self._before}"

    def _problems_offline(self, agent: Agent) -> Iterator[str]:
        status = _status(agent)
        if status.active not in (self._before.active, self._after.active):
            yield f"{status.active} serves, allowed: {self._before.active}, {self._after.active}; {status.reason}"
        yield from self._problems_of_link({status.active}, "restored")
        for version in {status.active, status.previous} - {None}:
            yield from self._damage(str(version), "restored")
            self.kept += 1

    def _problems_online(self, agent: Agent) -> Iterator[str]:
        desired = self._recording.world.publisher.current(MODEL)
        assert desired is not None
        is_ok = agent.run_once()
        agent.look()
        status = _status(agent)
        if (status.state, status.active) != ("COMMITTED", desired.version):
            yield f"does not arrive: {is_ok}, {agent.last_error}, {status.state} {status.active}: {status.reason}"
        yield from self._problems_of_link({desired.version}, "in the end")

    def _problems_of_link(self, allowed: set[str | None], when: str) -> Iterator[str]:
        version = self._version()
        if version not in allowed and not (version is None and self._before.active is None and when == "at first"):
            yield f"{when}: {version} is linked, allowed: {sorted(map(str, allowed))}"
        elif version is not None:
            yield from self._damage(version, when)

    def _version(self) -> str | None:
        """To which the link leads."""
        return self._link.readlink().name if self._link.is_symlink() else None

    def _damage(self, version: str, when: str) -> Iterator[str]:
        folder = self._recording.node / "models" / MODEL / version
        for name, digest in files_of(self._recording.signed[version]).items():
            data = (folder / name).read_bytes() if (folder / name).exists() else None
            if data is None or blake3(data).hexdigest() != digest:
                yield f"{when}: {name} of {version} is {'missing' if data is None else 'not what was signed'}"


def _status(agent: Agent) -> ModelStatus:
    (found,) = agent.status()
    return found
