"""A life of an agent, recorded: what it wrote, synced and renamed, and what it said was durable while it did.

A real sync service in this process, the agent under the shim in processes of its own, one after another: clean ends and
kills, releases that are committed, refused by the gate and rolled back, and a return to what was before.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

from sync.release import Manifest
from sync.service import ServiceConfig
from tests.power.disk import Disk, Image, read_image
from tests.power.log import Entry, Op, environment, read_log
from tests.power.node import VARIANT
from tests.sync.fakes import World, running, trained, weights

MODEL: Final = "digits"
_NODE: Final = "state/node"  # below what is watched, so that it counts who makes the folders on the way

LIFE_S: Final = 600  # by the clock of the node, which is put forward to end a probation


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What the journal said when everything before it in the log had happened."""

    state: str = "IDLE"
    version: str | None = None
    active: str | None = None
    previous: str | None = None
    epoch: int = 0  # at least
    floors: Mapping[str, int] = field(default_factory=dict)  # at least

    @property
    def place(self) -> tuple[str | None, ...]:
        return self.state, self.version, self.active, self.previous


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """`after` are the points between two entries of the log where a mark stands."""

    world: World
    disk: Path  # what was watched; it may be moved aside
    entries: Sequence[Entry]
    after: Sequence[int]
    marks: Sequence[Mark]
    signed: dict[str, Manifest] = field(default_factory=dict)

    @property
    def node(self) -> Path:
        return self.disk / _NODE

    def said(self, point: int) -> tuple[Mark, Mark]:
        """The last mark in the first `point` entries, and the one after it, which may have become true already."""
        number = bisect_right(self.after, point)
        before = self.marks[number - 1] if number else Mark()
        return before, self.marks[number] if number < len(self.marks) else before

    def whole(self) -> Image:
        """What the log alone says the folder must look like."""
        disk = Disk()
        for entry in self.entries:
            disk.apply(entry)
        return disk.whole()


class Recorder:
    """Use through `recording`."""

    def __init__(self, folder: Path, library: Path, address: str, world: World) -> None:
        self.world, self.disk, self._log = world, folder / "disk", folder / "power.log"
        self._child = 0
        self._weights, self._seed, self._lives = [weights(rows=16)], 0, 0
        self.disk.mkdir()
        command = (sys.executable, "-m", "tests.power.node", self.disk / _NODE, address, world.root)
        self._process = subprocess.Popen(
            command,
            env=environment(library, self.disk, self._log),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        self._process.communicate(timeout=30)

    def publish(self, releases: int = 1) -> None:
        for _ in range(releases):
            self._seed += 1
            names = ((), ("fc.weight",), ("conv.bias",))[self._seed % 3]
            self._weights.append(trained(self._weights[-1], *names, seed=self._seed))
            self.world.publish(self._weights[-1])

    def publish_small(self, slabs: int) -> int:
        """A release of many slabs of 64 bytes. Returns how many of them a node takes."""
        names = (f"layer{number}" for number in count())
        alone = (name for name in names if blake3(name.encode()).digest()[0] % 16 == 0)  # what ends a group of tensors
        self._seed += 1
        rng = np.random.default_rng(self._seed)
        self.world.publish({name: rng.normal(size=64).astype(np.float32) for name in islice(alone, slabs)})
        current = self.world.publisher.current(MODEL)
        assert current is not None
        manifest = self.world.publisher.manifest(MODEL, current.version)
        assert manifest is not None
        paths = files_of(manifest)
        return sum(len(file.slabs) for file in manifest.files if file.path in paths)

    def revert(self) -> None:
        """A new version with what the one before had."""
        self.world.publish(self._weights[-2])

    @contextmanager
    def life(self, *says: str) -> Iterator[None]:
        """A process that is ended, killed meanwhile, or ends itself."""
        self._lives += 1
        self._child = int(self._ask(f"life {LIFE_S * self._lives}"))
        self.say(*says)
        yield
        if self._child:
            self._ask("end")

    def kill(self) -> None:
        os.kill(self._child, signal.SIGKILL)
        self._child = self._over()

    def say(self, *lines: str) -> None:
        """Each of them done; the process may die of the last one."""
        for line in lines:
            self._ask(line)

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        word, _, rest = self._process.stdout.readline().partition(" ")
        if word == "over":
            assert int(rest) == (0 if line == "end" else -signal.SIGKILL), f"{line}: ended with {rest}"
            self._child = 0
        assert word, f"{line}: the process is gone"
        return str(rest)

    def _over(self) -> int:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().split() == ["over", str(-signal.SIGKILL)]
        return 0

    def recording(self) -> Recording:
        """Of what happened so far."""
        entries, after, marks = list[Entry](), list[int](), list[Mark]()
        for entry in read_log(self._log):
            if entry.op is Op.MARK:
                after.append(len(entries))
                marks.append(_mark(json.loads(entry.data)))
            else:
                entries.append(entry)
        versions = {mark.version for mark in marks} | {self.world.publisher.current(MODEL).version}  # type: ignore[union-attr]
        signed = {one: self.world.publisher.manifest(MODEL, one) for one in versions if one is not None}
        return Recording(
            world=self.world,
            disk=self.disk,
            entries=entries,
            after=after,
            marks=marks,
            signed={version: manifest for version, manifest in signed.items() if manifest is not None},
        )


def _mark(says: dict[str, Any]) -> Mark:
    state, version, active, previous, epoch = says["models"][MODEL]
    return Mark(state=state, version=version, active=active, previous=previous, epoch=epoch or 0, floors=says["floors"])


@contextmanager
def recorder(folder: Path, library: Path) -> Iterator[Recorder]:
    folder.mkdir(parents=True, exist_ok=True)
    world = World(folder / "world")
    with (
        running(ServiceConfig(store=str(world.store.root))) as address,
        contextlib.closing(Recorder(folder, library, address, world)) as one,
    ):
        yield one


def files_of(manifest: Manifest) -> dict[str, str]:
    """Digests of the files of a release that this node has, by path."""
    variant = next(one for one in manifest.variants if one.name == VARIANT)
    names = manifest.files_for(variant, "onnxruntime")
    return {file.path: file.digest for file in manifest.files if file.path in names}


# Versions are counted from 1, in the order in which they are published.


def lives(one: Recorder) -> None:
    """Of a node that always has something that serves."""
    one.publish(2)
    with one.life("poll", "pass"):  # 2 is its first
        one.publish()  # 3
        one.say("poll", "pass")
    one.publish()  # 4
    with one.life("refuse 4", "poll"):
        one.publish()  # 5
        one.say("poll")
        one.kill()
    one.publish()  # 6: waits for the probation of 5
    with one.life("poll", "pass", "poll", "pass"):
        one.publish()  # 7
        one.say("bad 7", "poll", "pass")  # back to 6
        one.publish()  # 8
        one.say("die renamed", "poll")
    with one.life("poll", "pass"):  # goes on with 8, whose folder is in its place
        one.publish()  # 9
        one.say("die link", "poll")
    with one.life("poll", "pass"):  # goes on with 9, whose link is in its place
        one.revert()  # 10
        one.say("poll", "pass")
        one.publish()  # 11
        one.say("bad 11", "poll", "die link", "pass")
    with one.life("poll"):  # goes on back to 10, which is linked again
        one.publish()  # 12
        one.say("poll", "pass")


def refused(one: Recorder) -> None:
    """A node that has nothing to fall back to."""
    one.publish()  # 1
    with one.life("die activated", "poll"):  # the link is set, the journal does not have it
        one.publish()  # 2
    with one.life("bad 2", "poll", "pass"):  # nothing is left: withdrawn
        one.publish()  # 3
        one.say("poll")
    with one.life("bad 3", "pass"):  # the same, in another life
        one.publish()  # 4
        one.say("poll", "pass")


SCENARIOS: Final[tuple[Callable[[Recorder], None], ...]] = (lives, refused)


def relaxed(one: Recorder) -> None:
    """Without synchronous=FULL."""
    one.publish()
    with one.life("relax", "poll", "pass"):
        for _ in range(3):
            one.publish()
            one.say("poll", "pass")


def same(left: Image, right: Image) -> list[str]:
    """Names of what differs, but for what SQLite maps and makes anew."""
    names = sorted(left.keys() | right.keys())
    return [one for one in names if not one.endswith("-shm") and left.get(one, "") != right.get(one, "")]


def on_disk(recording: Recording) -> Image:
    return read_image(recording.disk)
