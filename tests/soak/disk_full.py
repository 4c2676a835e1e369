"""`python -m tests.soak.disk_full [--rounds 20] [--seed N]`: the disk is full to the last byte from a failpoint on.

A node's folder on a disk of its own (tmpfs; mounting one needs the right to). At the failpoint a file takes all that is
free, so that every write after it fails. Asserted: what served goes on to serve, whole, in this process and in one that
starts on the full disk; once there is room again, the new version arrives and nobody had to do anything.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from common.errors import FolderUnusable
from sync.agent import Agent
from sync.agent.failpoints import NAMES, stopping
from sync.agent.frozen import restore_frozen
from sync.agent.probation import ProbationLimits
from sync.agent.states import Code
from sync.agent.why import find_journal, screen, why
from tests.sync.fakes import FakeInstaller, World, trained, weights

MODEL = "digits"
DISK_BYTES = 12 << 20
WATCHED = ("on probation", "rolling back", "reverted")  # where a version is watched, and is found to be bad


@contextlib.contextmanager
def disk(folder: Path, size: int = DISK_BYTES) -> Iterator[Path | None]:
    """A disk of `size` bytes at `folder`; None where there is no right to mount one."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "outrider-test", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        mounted = None
    if mounted is None or mounted.returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path) -> None:
    """Takes all that is free."""
    with path.open("ab") as file:
        while (found := os.statvfs(path.parent)).f_bavail:
            try:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, found.f_bavail * found.f_frsize)
            except OSError:
                return


class Case:
    """One failpoint, the `nth` time that it is reached."""

    def __init__(self, world: World, disk: Path, place: str, nth: int = 1) -> None:
        self.world, self.node, self.place, self.nth = world, disk / "node", place, nth
        self.ballast = disk / "ballast"
        self.problems: list[str] = []
        self._is_watched = place in WATCHED
        self._limits = ProbationLimits(seconds=0.5 if self._is_watched else 0.0)

    def run(self) -> list[str]:
        self.world.publish(weights())
        first = FakeInstaller()
        with self._agent(first) as agent:
            self._rounds(agent, lambda: agent.status()[0].state == "COMMITTED")
        self.world.publish(trained(weights()))
        installer = FakeInstaller(serving={MODEL: "1"}, bad_later={"2"} if self._is_watched else set())
        left = [self.nth]

        def stop(name: str) -> None:
            if name == self.place:
                left[0] -= 1
                if left[0] == 0:
                    fill(self.ballast)

        with stopping(stop), self._agent(installer) as agent:
            agent.restore()
            self._rounds(agent, self.ballast.exists, most=5)
            if not self.ballast.exists():
                self.problems.append(f"{self.place!r} was not reached {self.nth} times")
            self._rounds(agent, lambda: False, most=2)
            self._check("beside it", installer)
            if installer.serving == {MODEL: "1"} and not self._is_watched:
                self._check_reason(agent)
        self._started_anew("on the full disk")
        self.ballast.unlink(missing_ok=True)
        last = FakeInstaller()
        wanted = "1" if self._is_watched else "2"
        with self._agent(last) as agent:
            agent.restore()
            self._rounds(agent, lambda: last.serving.get(MODEL) == wanted)
            self._check("with room again", last)
        if last.serving.get(MODEL) != wanted and not self._is_watched:
            self.problems.append(f"with room again {last.serving} serves, not version {wanted}: {agent.last_error}")
        return [f"{self.place} ({self.nth}): {problem}" for problem in self.problems]

    def _rounds(self, agent: Agent, is_done: Callable[[], bool], most: int = 10) -> None:
        """Polls and looks as the agent's thread does: what they raise is tried again."""
        for _ in range(most):
            for step in (agent.run_once, agent.look):
                with contextlib.suppress(Exception):
                    step()
            self.world.clock.advance(seconds=1)
            if is_done():
                return

    def _check_reason(self, agent: Agent) -> None:
        codes = {one.code for one in agent.status()}
        if Code.DISK_FULL not in codes and "full" not in (agent.last_error or ""):
            self.problems.append(f"nothing says that the disk is full: {codes}, {agent.last_error}")
        self._check_screen()

    def _check_screen(self) -> None:
        for one in why(find_journal(self.node)):
            if self.ballast.exists() and "  disk       full" not in "\n".join(screen(one)):
                self.problems.append(f"the screen does not say that the disk is full: {screen(one)}")

    def _agent(self, installer: FakeInstaller) -> Agent:
        return self.world.agent(installer, str(self.node), probation=self._limits)

    def _started_anew(self, when: str) -> None:
        self._check_screen()  # with no agent at work
        installer = FakeInstaller()
        try:
            with self._agent(installer) as agent:
                agent.restore()
                self._check(when, installer)
                self._rounds(agent, lambda: False, most=2)
                self._check(f"{when}, after polls", installer)
        except (FolderUnusable, OSError):  # as in a serving process: what is installed serves, nothing new comes
            config = self.world.agent_config(str(self.node), probation=self._limits)
            restore_frozen(config, installer, self.world.events.append)
            self._check(f"{when}, frozen", installer)

    def _check(self, when: str, installer: FakeInstaller) -> None:
        version = installer.serving.get(MODEL)
        if version is None:
            self.problems.append(f"{when} nothing serves")
            return
        manifest = self.world.publisher.manifest(MODEL, version)
        assert manifest is not None
        for name in manifest.files_for(manifest.variants[0], "onnxruntime"):
            path = self.node / "models" / MODEL / version / name
            digest = next(file.digest for file in manifest.files if file.path == name)
            if not path.exists() or blake3(path.read_bytes()).hexdigest() != digest:
                self.problems.append(f"{when} {name} of version {version}, which serves, is not what was signed")


def run(folder: Path, places: Sequence[str], rng: random.Random | None = None) -> list[str] | None:
    """The problems found; None where no disk can be mounted."""
    problems: list[str] = []
    for number, place in enumerate(places):
        with disk(folder / f"disk-{number}") as mounted:
            if mounted is None:
                return None
            nth = 1 if rng is None or place != "slab written" else rng.randint(1, 3)
            problems += Case(World(folder / f"world-{number}"), mounted, place, nth).run()
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.disk_full", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each failpoint (%(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31), help="(random; printed)")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    logging.disable(logging.CRITICAL)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outrider-disk-full-") as folder:
        problems = run(Path(folder), NAMES * args.rounds, random.Random(args.seed))
    if problems is None:
        print("disk_full: no right to mount a small disk here, nothing was tried")
        return 0
    print(*problems[:20], sep="\n")
    seconds = time.monotonic() - started
    print(f"disk_full: {len(NAMES)} failpoints x {args.rounds}, {len(problems)} problems in {seconds:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
