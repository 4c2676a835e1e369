"""`python -m tests.power.node FOLDER SOURCE ROOT`: the agent under the shim, life after life, told what to do by lines.

    life AHEAD_S    a process of its own, whose clock is ahead; it answers to the following until `end`, or its death
    poll            one poll, and everything that follows from it
    pass            the probation is over: what is on it is judged
    bad VERSION     the golden set is passed before the swap, and not after it
    refuse VERSION  it is not passed at all
    die PLACE       from here on it kills itself at that failpoint, or at `link`: before the link's folder is synced
    relax           the journal is not synced with each transaction any more: what is wrong with that has to show

It remarks in the log what the journal says, whenever it was told that something changed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import sync.agent.links
from common.clock import SystemClock
from sync.agent.agent import Agent, AgentConfig
from sync.agent.failpoints import stopping
from sync.agent.links import LinkInstaller
from sync.agent.ports import GateVerdict, Staged
from sync.agent.running import SyncOptions, agent_config
from sync.events import Event, Installed, StateChanged

VARIANT: Final = "cpu-int8"
PROBATION_S: Final = 60.0


class Ahead(SystemClock):
    """Of the time, by as much as it is told."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def monotonic(self) -> float:
        return super().monotonic() + self.seconds

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.seconds)


class Judging(LinkInstaller):
    """Links to files, with an opinion about them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, (VARIANT,))
        self.bad, self.refused, self._serving = set[str](), set[str](), ""

    def gate(self, prepared: Staged) -> GateVerdict:
        return GateVerdict(passed=prepared.version not in self.refused, detail="")

    def activate(self, prepared: Staged) -> None:
        super().activate(prepared)
        self._serving = prepared.version

    def recheck(self, model: str) -> GateVerdict | None:
        return GateVerdict(passed=self._serving not in self.bad, detail="")


def main() -> None:
    """A fork for each life, so that only the first one has to wait for imports."""
    folder, source, root = sys.argv[1:]
    options = SyncOptions(source=source, root=root, probation_s=PROBATION_S)
    config = agent_config(options, Path(folder), ("onnxruntime",))
    while line := sys.stdin.readline():
        _, ahead_s = line.split()
        child = os.fork()
        if child == 0:
            live(config, Ahead(float(ahead_s)))
            os._exit(0)
        answer("life", child)
        _, status = os.waitpid(child, 0)
        answer("over", os.waitstatus_to_exitcode(status))


def live(config: AgentConfig, clock: Ahead) -> None:
    installer, place = Judging(config.folder / "current"), ""

    def tell(event: Event) -> None:
        if isinstance(event, StateChanged | Installed):
            told = {one.model: [one.state, one.version, one.active, one.previous, one.epoch] for one in agent.status()}
            mark({"models": told, "floors": agent._journal.floors()})

    def stop(name: str) -> None:
        if name == place:
            die()

    agent = Agent(config, installer, on_event=tell, clock=clock)
    with stopping(stop):
        agent.restore()
        while (line := sys.stdin.readline().strip()) != "end":
            word, _, argument = line.partition(" ")
            if word == "poll":
                agent.run_once()
            elif word == "pass":
                clock.seconds += PROBATION_S + 1
                agent.look()
            elif word == "die":
                place = argument
                if place == "link":
                    sync.agent.links.sync_folder = die
            elif word == "bad":
                installer.bad.add(argument)
            elif word == "refuse":
                installer.refused.add(argument)
            elif word == "relax":
                agent._journal._db.execute("PRAGMA synchronous=NORMAL")
            else:
                raise SystemExit(f"{word!r} is not among the words that are known here")
            answer("done", line)
    agent.close()


def answer(*words: object) -> None:
    print(*words, flush=True)


def mark(says: dict[str, Any]) -> None:
    ctypes.CDLL(None).power_mark(json.dumps(says).encode())


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
