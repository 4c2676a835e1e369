"""`python -m tests.soak.agent_kills [--kills 2000] [--rounds 20] [--seed N]`: an agent that is killed while it works.

A sync service and a publisher that never rests; beside them `outrider sync agent`'s own code in a process of its own,
forked warm so that a life takes milliseconds. First each failpoint, `--rounds` times: the process kills itself there.
Then kill -9 from outside, anywhere. After every death the files behind `current/MODEL` have to be, byte for byte, those
of one signed release, the one that the journal says serves; at the end the last release has to arrive.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from sync.agent.failpoints import NAMES
from sync.agent.journal import Journal
from sync.service import ServiceConfig
from tests.sync.fakes import World, running, trained, weights

MODEL: Final = "digits"
ROLLED_BACK: Final = ("rolling back", "reverted")  # nothing is watched behind a link: tests/sync/agent/test_watch.py
_LIFE_S: Final = 0.35  # of a process, at most, before it is killed
_PAUSE_S: Final = 0.05  # between two releases
_WAIT_S: Final = 30.0


@dataclass
class Outcome:
    lives: int = 0
    by_state: Counter[str] = field(default_factory=Counter)  # in which state the journal was found
    served: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


class Rig:
    def __init__(self, folder: Path, address: str, world: World) -> None:
        self.world, self.address, self.node = world, address, folder / "node"
        self.outcome = Outcome()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["sync.agent.command", "sync.agent.running", "sync.agent.links"])

    def life(self, place: str | None = None, nth: int = 1) -> Any:
        """Begins one: a process that works until it is killed, or dies at the `nth` time that it reaches `place`."""
        where = (str(self.node), self.address, str(self.world.root), place, nth)
        process = self._context.Process(target=work, args=where, daemon=True)
        process.start()
        return process

    def check(self) -> None:
        """What is there after a death."""
        self.outcome.lives += 1
        current = self.node / "current" / MODEL
        if not (self.node / "journal.db").exists():
            return
        with closing(Journal(self.node / "journal.db")) as journal:
            record = journal.record(MODEL)
        self.outcome.by_state[record.state] += 1
        if not current.exists():
            if record.active is not None:
                self.outcome.problems.append(f"{record.active} serves by the journal, and nothing is there")
            return
        version = current.resolve().name
        self.outcome.served.add(version)
        allowed = {record.active, record.version}  # the link is set just before the journal says so
        if version not in allowed:
            self.outcome.problems.append(f"version {version} serves, the journal has {record}")
        self.outcome.problems += self._differences(version, current)

    def _differences(self, version: str, folder: Path) -> Iterator[str]:
        manifest = self.world.publisher.manifest(MODEL, version)
        assert manifest is not None
        variant = manifest.variants[0]
        for name in manifest.files_for(variant, "onnxruntime"):
            digest = next(file.digest for file in manifest.files if file.path == name)
            data = (folder / name).read_bytes() if (folder / name).exists() else b""
            if blake3(data).hexdigest() != digest:
                yield f"{name} of version {version} is not what was signed"


def work(folder: str, address: str, root: str, place: str | None, nth: int) -> None:
    """In a process of its own."""
    from sync.agent.agent import Agent
    from sync.agent.failpoints import stopping
    from sync.agent.links import LinkInstaller
    from sync.agent.running import SyncOptions, agent_config

    left = [nth]

    def stop(name: str) -> None:
        if name == place:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    options = SyncOptions(source=address, root=root, interval_s=0.1, min_gap_s=0.01, probation_s=0.0)
    config = agent_config(options, Path(folder), ("onnxruntime",))
    with stopping(stop), Agent(config, LinkInstaller(Path(folder) / "current", ("cpu-int8",))) as agent:
        agent.start()
        time.sleep(_WAIT_S)


@contextmanager
def publishing(world: World, seed: int) -> Iterator[None]:
    """New releases all the time: small steps in one or in all tensors, now and then a return to what was."""
    is_over = threading.Event()

    def publish() -> None:
        rng, tensors = random.Random(seed), weights()
        while not is_over.is_set():
            tensors = trained(tensors, *rng.choice([(), ("fc.weight",), ("conv.bias",)]), seed=rng.randrange(1 << 30))
            world.publish(tensors)
            is_over.wait(_PAUSE_S)

    thread = threading.Thread(target=publish, name="publisher")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def run(folder: Path, *, kills: int, rounds: int, seed: int, places: Sequence[str] = NAMES) -> Outcome:
    rng, world = random.Random(seed), World(folder / "world")
    world.publish(weights())
    with running(ServiceConfig(store=str(world.store.root))) as address:
        rig = Rig(folder, address, world)
        with publishing(world, seed):
            for place in places:
                for _ in range(0 if place in ROLLED_BACK else rounds):
                    _die_at(rig, place, rng)
            for _ in range(kills):
                process = rig.life()
                time.sleep(rng.uniform(0.0, _LIFE_S))
                process.kill()
                process.join()
                rig.check()
        _arrives(rig)
    return rig.outcome


def _die_at(rig: Rig, place: str, rng: random.Random) -> None:
    process = rig.life(place, rng.randint(1, 3))
    process.join(_WAIT_S)
    if process.exitcode != -signal.SIGKILL:
        process.kill()
        process.join()
        rig.outcome.problems.append(f"{place!r} was not reached: {process.exitcode}")
    rig.check()


def _arrives(rig: Rig) -> None:
    """Nobody does anything for it: the next life brings what is desired."""
    desired = rig.world.publisher.current(MODEL)
    assert desired is not None
    process = rig.life()
    end = time.monotonic() + _WAIT_S
    while time.monotonic() < end and (rig.node / "current" / MODEL).resolve().name != desired.version:
        time.sleep(0.05)
    process.kill()
    process.join()
    rig.check()
    if desired.version not in rig.outcome.served:
        rig.outcome.problems.append(f"version {desired.version} did not arrive at the end")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.agent_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=2000, help="from outside, anywhere (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of each failpoint (%(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31), help="(random; printed)")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outrider-kills-") as folder:
        outcome = run(Path(folder), kills=args.kills, rounds=args.rounds, seed=args.seed)
    for problem in outcome.problems[:20]:
        print(problem)
    states = ", ".join(f"{state} {count}" for state, count in sorted(outcome.by_state.items()))
    seconds = time.monotonic() - started
    said = f"{outcome.lives} lives, {len(outcome.served)} versions served, {len(outcome.problems)} problems"
    print(f"agent_kills: {said} in {seconds:.0f} s; found in {states}")
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
