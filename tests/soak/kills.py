"""Death and return: the load that the system sustains, then most of it with a kill -9 each 20 s and a push each minute.

Any process below `outrider up` may be hit. Asserted: no failed call, no answer without a stamp, every killed process is
back, the last push is served by all, and nothing is left once `up` has ended.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter

from common.request import SLA_S, Priority
from tests.soak.load import Load, Seen, measure
from tests.soak.pace import ticks
from tests.soak.pushes import Pushes, say
from tests.soak.result import Result
from tests.system.running import Up, is_alive

KILL_EVERY_S, PUSH_EVERY_S = 20.0, 60.0
SHARE = 0.6  # of what is sustained
SOUND_P99_MS = 1000 * SLA_S[Priority.INTERACTIVE]  # the class of these calls
_STEP_S, _TRIES, _FIRST, _GROWTH, _HIGHEST = 6.0, 2, 40.0, 1.5, 5000.0
_HALVINGS = 2
_BACK_S = 60.0


async def sustained(up: Up) -> tuple[float, Seen]:
    """The highest rate found at which no call fails and p99 stays sound; its figures.

    Each rate tried is half as high again, until one is too high; what lies between is halved twice.
    """
    best, found, rate = 0.0, Seen(), _FIRST
    while rate <= _HIGHEST and (seen := await _sound(up, rate)):
        best, found, rate = rate, seen, rate * _GROWTH
    if not best or rate > _HIGHEST:
        return best, found
    low, high = best, rate
    for _ in range(_HALVINGS):
        middle = round((low + high) / 2)
        if seen := await _sound(up, middle):
            low, found = middle, seen
        else:
            high = middle
    return low, found


async def _sound(up: Up, rate: float) -> Seen | None:
    """The figures at `rate` when it is sound. It gets a second try: other work of the machine may disturb the first."""
    for _ in range(_TRIES):
        seen = await measure(up, rate, _STEP_S)
        p99, done = seen.p(0.99), len(seen.seconds)
        say(f"{rate:6.0f} calls/s for {_STEP_S:g} s: p50 {seen.p(0.5):.1f} ms, p99 {p99:.1f} ms, {done} answers")
        if not seen.problems() and p99 <= SOUND_P99_MS and done >= 0.95 * rate * _STEP_S:
            return seen
    return None


async def run_measure(up: Up) -> tuple[float, Result]:
    rate, seen = await sustained(up)
    figures = {"sustained_per_s": round(rate, 1), "p50_ms": round(seen.p(0.5), 2), "p99_ms": round(seen.p(0.99), 2)}
    problems = [] if rate else [f"not even {_FIRST:g} calls/s with a p99 within {SOUND_P99_MS:g} ms"]
    says = f"{rate:.0f} calls/s sustained without kills, p99 {seen.p(0.99):.1f} ms (at most {SOUND_P99_MS:g})"
    return rate, Result(part="load", says=says, problems=problems, figures=figures)


async def run(up: Up, *, rate: float, minutes: float, seed: int, kill_every_s: float, push_every_s: float) -> Result:
    """Leaves the system up: who ends it asserts that nothing is left."""
    say(f"kills: {rate:.0f} calls/s for {60 * minutes:.0f} s, a kill each {kill_every_s:g} s, seed {seed}")
    pushes = Pushes(up)
    pushes.prepare()
    killer = Killer(up, random.Random(seed))
    async with Load(up, rate, seed=seed) as load:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as beside:
            beside.create_task(killer.each(kill_every_s, over))
            beside.create_task(pushes.each(push_every_s, over))
            await asyncio.sleep(60 * minutes)
            over.set()
        await killer.all_back()
        await pushes.push("v2")
        converged_s = await pushes.until_served()
    seen = load.seen
    problems = [*seen.problems(), *killer.problems, *pushes.problems]
    problems += await asyncio.to_thread(load.truth.problems, pushes.stages)
    says = (
        f"{seen.calls} calls at {rate:.0f}/s, {seen.failed} failed, {seen.unstamped} without a stamp; "
        f"{sum(killer.killed.values())} kills; {len(pushes.pushed)} pushes, the last one served by all "
        f"{converged_s:.1f} s later; p50 {seen.p(0.5):.1f}, p99 {seen.p(0.99):.1f}, longest {seen.p(1.0):.0f} ms"
    )
    figures = {
        "seed": seed,
        "rate_per_s": round(rate, 1),
        "calls": seen.calls,
        "failed": seen.failed,
        "unstamped": seen.unstamped,
        "compared": load.truth.kept,
        "kills": dict(killer.killed),
        "back_s": {name: round(max(seconds), 2) for name, seconds in killer.back_s.items()},
        "pushes": len(pushes.pushed),
        "converged_s": round(converged_s, 2),
        "p50_ms": round(seen.p(0.5), 2),
        "p99_ms": round(seen.p(0.99), 2),
        "longest_ms": round(seen.p(1.0), 1),
        "targets": dict(seen.targets.most_common()),
    }
    return Result(part="kills", says=says, problems=problems, figures=figures)


class Killer:
    """Kills one process at random, waits until its successor says where it is. `back_s`: how long that took."""

    def __init__(self, up: Up, rng: random.Random) -> None:
        self._up, self._rng = up, rng
        self.killed: Counter[str] = Counter()
        self.back_s: dict[str, list[float]] = {}
        self.problems: list[str] = []

    async def each(self, seconds: float, over: asyncio.Event) -> None:
        async for _ in ticks(seconds, over):
            children = self._up.children()
            pid = self._rng.choice(sorted(children, key=lambda pid: children[pid]))
            await self.kill(pid, children[pid])

    async def kill(self, pid: int, name: str) -> None:
        say(f"kill -9 {name} ({pid})")
        started = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.killed[name] += 1
        while self._up.processes().get(name, {}).get("pid") in (pid, None):
            await asyncio.sleep(0.05)
            if time.monotonic() - started > _BACK_S:
                self.problems.append(f"{name} is not back {_BACK_S:g} s after kill -9")
                return
        self.back_s.setdefault(name, []).append(time.monotonic() - started)

    async def all_back(self) -> None:
        deadline = time.monotonic() + _BACK_S
        while gone := [n for n, p in self._up.processes().items() if not is_alive(p.get("pid", 0))]:
            if time.monotonic() > deadline:
                self.problems.append(f"not running at the end: {', '.join(gone)}")
                return
            await asyncio.sleep(0.1)


def run_shutdown(up: Up) -> Result:
    """Ends `up` as Ctrl-C does."""
    started = time.monotonic()
    try:
        code = up.stop()
        problems = [] if code == 0 else [f"`outrider up` ended with {code}"]
    except AssertionError as exc:
        problems = [f"processes are left: {exc}"]
    seconds = time.monotonic() - started
    says = f"`outrider up` ended in {seconds:.1f} s, {len(problems)} problems"
    return Result(part="shutdown", says=says, problems=problems, figures={"seconds": round(seconds, 2)})
