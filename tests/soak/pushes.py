"""Releases of `digits` while the system runs, and the question whether all who should serve the last one.

A push is `outrider publish` as an operator runs it; the stages are trained once and only their release is new.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hardware.demo.digits import Stage
from hardware.demo.prepare import prepare_stages
from tests.soak.load import digits_spec
from tests.soak.pace import ticks
from tests.system.running import OUTRIDER, Up

STAGES: tuple[Stage, ...] = ("v2", "v3", "v4", "v1")
CONVERGE_S = 120.0
SERVING = ("edge-a", "edge-b", "worker-1", "worker-2")


@dataclass
class Pushes:
    """`pushed`: the versions, oldest first, `stages`: what each is; `seconds`: from the command to its release."""

    up: Up
    pushed: list[str] = field(default_factory=list)
    stages: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def prepare(self, stages: Sequence[Stage] = STAGES) -> None:
        """Trains what is not there yet: work that must not stand beside the load."""
        missing = [stage for stage in stages if not digits_spec(self.up.bundles, stage).exists()]
        if missing:
            prepare_stages("digits", self.up.bundles / "sources", missing, progress=lambda _line: None)

    async def each(self, seconds: float, over: asyncio.Event) -> None:
        async for number in ticks(seconds, over):
            await self.push(STAGES[number % len(STAGES)])

    async def push(self, stage: str) -> None:
        state, started = self.up.state, time.monotonic()
        where = ("--store", state / "store", "--keys", state / "keys", "--bundles", self.up.bundles / "bundles")
        command = ("publish", digits_spec(self.up.bundles, stage), *where, "--force", "--json")
        child = await asyncio.create_subprocess_exec(
            *OUTRIDER,
            *map(str, command),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self.up.environment},
        )
        out, err = await child.communicate()
        if child.returncode != 0:
            self.problems.append(f"push of digits {stage} ended with {child.returncode}: {err.decode()[-600:]}")
            return
        self.pushed.append(json.loads(out)["version"])
        self.stages[self.pushed[-1]] = stage
        self.seconds.append(time.monotonic() - started)

    async def until_served(self, timeout_s: float = CONVERGE_S) -> float:
        """Seconds until every node and worker serves the last push. A problem is noted when they do not."""
        started = time.monotonic()
        late = list(SERVING)
        while late and time.monotonic() - started < timeout_s:
            late = [name for name in late if await asyncio.to_thread(self.served, name) != self.pushed[-1]]
            await asyncio.sleep(0.1 if late else 0.0)
        for name in late:
            self.problems.append(f"{name} serves digits {self.served(name)!r}, not {self.pushed[-1]}")
        return time.monotonic() - started

    def served(self, name: str) -> str:
        """The version of `digits` that a process serves; empty when it cannot be reached or has none ready."""
        try:
            request = urllib.request.Request(f"{self.up.http(name)}/v2/repository/index", data=b"{}", method="POST")
            with urllib.request.urlopen(request, timeout=5) as answer:
                index: list[dict[str, Any]] = json.loads(answer.read())
        except (OSError, KeyError, ValueError, urllib.error.URLError):
            return ""
        return next((e["version"] for e in index if (e["name"], e["state"]) == ("digits", "READY")), "")


def say(line: str) -> None:
    print(f"       {line}", file=sys.stderr, flush=True)
