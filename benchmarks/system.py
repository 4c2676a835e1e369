"""`outrider up` under measurement: the whole system as a user starts it, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import OUTRIDER, child, wait_for

BUILD_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """`ready_s`: from the command to the moment when every process serves. `pids` by process, `up` itself included."""

    ready_s: float
    pids: dict[str, int]


@contextlib.contextmanager
def up(state: Path, bundles: Path) -> Iterator[Up]:
    """`state` may be new (keys and releases are made) or one of an earlier start."""
    log = state.parent / f"{state.name}.log"
    started = time.perf_counter()
    command = (*OUTRIDER, "up", "--state", state, "--bundles", bundles, "--base-port", "0")
    with child(*command, log=log) as process:
        wait_for(state / "endpoints.json", process, log, BUILD_S)
        seconds = time.perf_counter() - started
        told = json.loads((state / "endpoints.json").read_bytes())["processes"]
        yield Up(ready_s=seconds, pids={"up": process.pid} | {one["name"]: one["pid"] for one in told})
