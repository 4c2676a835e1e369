"""`python -m tests.soak.swaps [--swaps 1000] [--rate 200]`: one swap after another while calls come at a fixed rate.

Each swap is a release that goes the whole way: signed, fetched, verified, gated, warmed, swapped. Stretches with swaps
and steady ones alternate; an answer's time is counted from when its call was due. Asserted: no call fails, each is
answered by a version that served between its beginning and its end, p99 while swapping <= 1.25 x p99 while steady.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edge.client import AsyncClient
from tests.soak.one_node import ECHO, OneNode, Releases, one_node
from tests.soak.result import Result

RATE, STRETCH = 200.0, 50  # calls a second; swaps of a stretch
MOST_RATIO = 1.25
ENGINE = 'engines = ["synthetic"]\nvariants = ["full"]\n[engine.synthetic.echo]\na_ms = 4.0\nb_ms = 0.5'


@dataclass
class Seen:
    calls: int = 0
    problems: list[str] = field(default_factory=list)
    steady: list[list[float]] = field(default_factory=list)
    swapping: list[list[float]] = field(default_factory=list)
    released: dict[str, float] = field(default_factory=dict)  # when, by version; in this order
    served: dict[str, float] = field(default_factory=dict)  # since when for certain
    answers: list[tuple[str, float, float]] = field(default_factory=list)  # version, due, ended

    def mixed(self) -> int:
        """Answers by a version that had not been released when they ended, or was replaced before they began."""
        versions = list(self.released)
        replaced = {old: self.served[new] for old, new in itertools.pairwise(versions)}
        return sum(
            version not in self.released or ended < self.released[version] or due > replaced.get(version, ended)
            for version, due, ended in self.answers
        )


async def run(folder: Path, *, swaps: int, rate: float) -> Result:
    seen, started = Seen(), time.monotonic()
    with one_node(folder, ECHO, engine=ENGINE) as (releases, node):
        async with node.client() as client:
            seen.released["1"] = started
            await node.until_serves(client, ECHO, "1")
            seen.served["1"] = time.monotonic()
            left, took = swaps, []
            while left:
                count = min(STRETCH, left)
                left -= count
                beginning = time.monotonic()
                async with Calls(client, rate, seen) as calls:
                    for _ in range(count):
                        await _swap(releases, node, client, seen)
                seen.swapping.append(calls.seconds)
                took.append((time.monotonic() - beginning) / count)
                async with Calls(client, rate, seen) as calls:
                    await asyncio.sleep(time.monotonic() - beginning)
                seen.steady.append(calls.seconds)
    return _result(seen, swaps, rate, statistics.median(took), time.monotonic() - started)


async def _swap(releases: Releases, node: OneNode, client: AsyncClient, seen: Seen) -> None:
    begun = time.monotonic()
    version = await asyncio.to_thread(releases.release)
    seen.released[version] = begun
    await node.until_serves(client, ECHO, version)
    seen.served[version] = time.monotonic()


class Calls:
    """An async context: calls at a fixed rate from entering to leaving, which waits for the answers."""

    def __init__(self, client: AsyncClient, rate: float, seen: Seen) -> None:
        self._client, self._rate, self._seen = client, rate, seen
        self._tasks: set[asyncio.Task[None]] = set()
        self.seconds: list[float] = []

    async def __aenter__(self) -> Calls:
        self._pacing = asyncio.create_task(self._pace())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pacing.cancel()
        await asyncio.gather(self._pacing, return_exceptions=True)
        await asyncio.gather(*self._tasks)

    async def _pace(self) -> None:
        start = time.monotonic()
        number = 0
        while True:
            due = start + number / self._rate
            await asyncio.sleep(due - time.monotonic())
            task = asyncio.create_task(self._call(number, due))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            number += 1

    async def _call(self, number: int, due: float) -> None:
        seen = self._seen
        seen.calls += 1
        x = np.full((1, 16), number % 1000, np.float32)
        try:
            answer = await self._client.infer(ECHO, {"x": x}, timeout_s=10.0)
        except Exception as exc:
            seen.problems.append(f"call {seen.calls} failed: {type(exc).__name__}: {exc}")
            return
        ended = time.monotonic()
        self.seconds.append(ended - due)
        seen.answers.append((answer.version, due, ended))
        if not np.array_equal(answer.outputs["y"], x):
            seen.problems.append(f"call {seen.calls} was answered with another call's rows")


def _result(seen: Seen, swaps: int, rate: float, swap_s: float, seconds: float) -> Result:
    def p99_ms(stretches: list[list[float]]) -> float:
        return 1000 * statistics.median(float(np.quantile(one, 0.99)) for one in stretches)

    steady, swapping, mixed = p99_ms(seen.steady), p99_ms(seen.swapping), seen.mixed()
    problems = list(seen.problems[:20])
    if mixed:
        problems.append(f"{mixed} answers by a version that did not serve then")
    if swapping > MOST_RATIO * steady:
        problems.append(f"p99 {swapping:.2f} ms while swapping is over {MOST_RATIO} x {steady:.2f} ms")
    says = (
        f"{swaps} swaps under {rate:.0f} calls/s in {seconds:.0f} s ({swap_s:.2f} s a swap): {seen.calls} calls, "
        f"{len(seen.problems)} failed, {mixed} mixed; p99 {swapping:.2f} ms, steady {steady:.2f} ms "
        f"({swapping / steady:.2f} x; medians of {len(seen.steady)} stretches)"
    )
    figures = {"swaps": swaps, "calls": seen.calls, "failed": len(seen.problems), "mixed": mixed}
    figures |= {"p99_ms": round(swapping, 2), "steady_p99_ms": round(steady, 2), "ratio": round(swapping / steady, 3)}
    return Result(part="swaps", says=says, problems=problems, figures=figures)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.swaps", description=__doc__)
    parser.add_argument("--swaps", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--rate", type=float, default=RATE, help="calls a second (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outrider-swaps-") as folder:
        result = asyncio.run(run(Path(folder), swaps=args.swaps, rate=args.rate))
    print(result.line())
    print(f"swaps: {result.says}")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
