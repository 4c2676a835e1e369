"""The wall clock stepped by an hour, either way, under load and pushes: nothing expires, stalls or refills.

The system runs under a library of our own (`step.c`, which says why it is not libfaketime) that reads the step from a
file; the monotonic clock is left alone, as a step of the real clock leaves it. Skipped where there is no C compiler.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
import urllib.request
from email.utils import parsedate_to_datetime
from pathlib import Path

from tests.soak.load import STALL_S, Load
from tests.soak.pushes import STAGES, Pushes, say
from tests.soak.result import Result
from tests.system.running import Up

STEPS = (+3600, 0, -3600, 0)  # seconds
_FOLLOW_S = 20.0


def build(folder: Path) -> Path | None:
    """The library; None where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "step.so"
    source = Path(__file__).with_name("step.c")
    subprocess.run((compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl", "-lpthread"), check=True)
    return library


def run(state: Path, bundles: Path, *, rate: float, minutes: float, seed: int) -> Result:
    """Starts a system of its own in `state`, and ends it."""
    library = build(state.parent)
    if library is None:
        return Result(part="clock", says="there is no C compiler here", skipped=True)
    offset = state.parent / f"{state.name}.step"
    _step(offset, 0)
    up = Up(state, bundles, environment={"LD_PRELOAD": str(library), "STEP_FILE": str(offset)})
    up.start()
    try:
        return asyncio.run(_run(up, offset, rate=rate, minutes=minutes, seed=seed))
    finally:
        up.stop()


async def _run(up: Up, offset: Path, *, rate: float, minutes: float, seed: int) -> Result:
    say(f"clock: {rate:.0f} calls/s, steps of {_said()} over {60 * minutes:.0f} s")
    pushes = Pushes(up)
    pushes.prepare()
    took: dict[str, float] = {}
    problems: list[str] = []
    async with Load(up, rate, seed=seed, longest_s=STALL_S) as load:
        for number, step in enumerate(STEPS):
            due = time.monotonic() + 60 * minutes / len(STEPS)
            _step(offset, step)
            say(f"the clock is {step:+} s off")
            if not await _followed(up, step):
                problems.append(f"the clock of the system did not follow to {step:+} s")
            await pushes.push(STAGES[number])
            took[f"{number}: {step:+} s"] = round(await pushes.until_served(), 2)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
    seen = load.seen
    problems += [*seen.problems(), *pushes.problems, *await asyncio.to_thread(load.truth.problems, pushes.stages)]
    says = (
        f"{seen.calls} calls at {rate:.0f}/s through steps to {_said()}: {seen.failed} failed; "
        f"{len(pushes.pushed)} pushes, served by all within {max(took.values()):.1f} s; p99 {seen.p(0.99):.1f} ms"
    )
    figures = {
        "calls": seen.calls,
        "failed": seen.failed,
        "compared": load.truth.kept,
        "converged_s": took,
        "p99_ms": round(seen.p(0.99), 2),
        "longest_ms": round(seen.p(1.0), 1),
    }
    return Result(part="clock", says=says, problems=problems, figures=figures)


def _said() -> str:
    return ", ".join(f"{step:+} s" for step in STEPS)


def _step(offset: Path, step: int) -> None:
    partial = offset.with_suffix(".tmp")
    partial.write_text(f"{step}\n")
    partial.replace(offset)


async def _followed(up: Up, step: int) -> bool:
    """Whether a node comes to tell the stepped time: its answers carry a Date."""
    deadline = time.monotonic() + _FOLLOW_S
    while time.monotonic() < deadline:
        if abs(await asyncio.to_thread(_date, up) - time.time() - step) < 60:
            return True
        await asyncio.sleep(0.2)
    return False


def _date(up: Up) -> float:
    with urllib.request.urlopen(f"{up.http('edge-a')}/v2/health/live", timeout=10) as reply:
        return parsedate_to_datetime(reply.headers["Date"]).timestamp()
