"""Memory: the same load and pushes without kills; no process may grow by more than 2 % once it has warmed up.

Nor may one be another process than at the start: a crash, and the return from it, would hide what it had grown to.
Resident memory of each process is sampled each second. The first window is the one after the warm-up (two minutes of a
full run), the last one ends with the run; their medians are compared.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.soak.load import STALL_S, Load
from tests.soak.pushes import Pushes, say
from tests.soak.result import Result
from tests.system.running import Up

MOST = 0.02
WARM_UP_SHARE, WARM_UP_S = 0.2, 120.0
_WINDOWS = 8  # of the time after the warm-up: the first and the last are compared

Sample = tuple[float, Mapping[str, int]]  # seconds since the start, KiB by process
Pids = Mapping[str, frozenset[int]]  # by name of process


async def run(up: Up, *, rate: float, minutes: float, seed: int, push_every_s: float) -> Result:
    seconds = 60 * minutes
    say(f"growth: {rate:.0f} calls/s for {seconds:.0f} s without kills")
    samples: list[Sample] = []
    pids: list[Pids] = []
    pushes, over = Pushes(up), asyncio.Event()
    pushes.prepare()
    async with Load(up, rate, seed=seed, longest_s=STALL_S) as load, asyncio.TaskGroup() as beside:
        beside.create_task(pushes.each(push_every_s, over))
        started = time.monotonic()
        while (at := time.monotonic() - started) < seconds:
            sample, now = await asyncio.to_thread(_sample, up, "VmRSS")
            samples.append((at, sample))
            pids.append(now)
            await asyncio.sleep(min(1.0, seconds / 60))
        over.set()
    pids.append((await asyncio.to_thread(_sample, up, "VmRSS"))[1])
    warm_up_s = min(WARM_UP_S, WARM_UP_SHARE * seconds)
    grown = growth([sample for sample in samples if sample[0] >= warm_up_s])
    problems = [
        f"{name} grew from {first:.0f} to {last:.0f} KiB, by {last / first - 1:.1%}"
        for name, (first, last) in grown.items()
        if last > first * (1 + MOST)
    ]
    problems += changes(pids)
    worst = max(grown, key=lambda name: grown[name][1] / grown[name][0])
    says = (
        f"{load.seen.calls} calls at {rate:.0f}/s; after {warm_up_s:.0f} s the most that a process grew is "
        f"{grown[worst][1] / grown[worst][0] - 1:+.2%} ({worst})"
    )
    figures = {
        "rate_per_s": round(rate, 1),
        "calls": load.seen.calls,
        "compared": load.truth.kept,
        "rss_mib": {name: [round(first / 1024, 1), round(last / 1024, 1)] for name, (first, last) in grown.items()},
        "growth": {name: round(last / first - 1, 4) for name, (first, last) in grown.items()},
    }
    wrong = await asyncio.to_thread(load.truth.problems, pushes.stages)
    problems = [*load.seen.problems(), *pushes.problems, *wrong, *problems]
    return Result(part="growth", says=says, problems=problems, figures=figures)


def growth(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """By process: the median of the first and of the last window."""
    width = max(1, len(samples) // _WINDOWS)
    names = set.intersection(*(set(sample) for _, sample in samples))
    return {
        name: (
            statistics.median(sample[name] for _, sample in samples[:width]),
            statistics.median(sample[name] for _, sample in samples[-width:]),
        )
        for name in sorted(names)
    }


def changes(pids: Sequence[Pids]) -> list[str]:
    """A problem for each name that was not the same process, or processes, all the time."""
    problems = []
    for name in sorted({name for each in pids for name in each}):
        seen = [sorted(each.get(name, ())) for each in pids]
        steps = [seen[0], *(after for before, after in itertools.pairwise(seen) if after != before)]
        if len(steps) > 1:
            problems.append(f"{name} ended or was started: pids {', then '.join(map(str, steps))}")
    return problems


def _sample(up: Up, what: str) -> tuple[dict[str, int], Pids]:
    """KiB of every process, the supervisor among them; and which processes these are."""
    found: dict[str, int] = {}
    pids: dict[str, frozenset[int]] = {}
    for pid, name in ({up.process.pid: "up"} | up.children()).items():
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # ended meanwhile: missed in this sample
            continue
        found[name] = next((int(line.split()[1]) for line in status.splitlines() if line.startswith(what)), 0)
        pids[name] = pids.get(name, frozenset()) | {pid}
    return found, pids
