"""`python -m tests.soak.node_kills [--kills 100] [--rate 50] [--seed N]`: kill -9 of a whole node under load.

Releases never rest, calls come at a fixed rate and find nobody while the node is dead. Asserted: every answer is,
number for number, that of the version on its stamp, which was signed and released; after each death the node serves
again unaided; at the end the last release arrives.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from common.errors import OutriderError
from edge.client import AsyncClient
from tests.soak.one_node import LINEAR, OneNode, Releases, X, answer_of, one_node
from tests.soak.result import Result

RATE = 50.0
LIFE_S = 1.5  # after it serves again, at most, until it is killed
PAUSE_S = 0.05  # between two releases


@dataclass
class Seen:
    released: set[str] = field(default_factory=lambda: {"1"})
    answers: int = 0
    nobody: int = 0  # calls that found no node
    versions: set[str] = field(default_factory=set)
    back_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


async def run(folder: Path, *, kills: int, seed: int, rate: float = RATE) -> Result:
    rng, seen = random.Random(seed), Seen()
    with one_node(folder) as (releases, node):
        async with node.client() as client:
            await node.until_serves(client, LINEAR, None)
            async with _calling(client, rate, seen), _releasing(releases, seen):
                for number in range(kills):
                    await asyncio.sleep(rng.uniform(0.0, LIFE_S))
                    await asyncio.to_thread(node.kill)
                    started = time.monotonic()
                    node.start()
                    if rng.random() < 0.3:  # dies again while it starts
                        await asyncio.sleep(rng.uniform(0.0, 1.0))
                        await asyncio.to_thread(node.kill)
                        node.start()
                    try:
                        await node.until_serves(client, LINEAR, None)
                    except TimeoutError as exc:
                        seen.problems.append(f"after kill {number + 1}: {exc}")
                        break
                    seen.back_s.append(time.monotonic() - started)
            last = await asyncio.to_thread(releases.release)
            seen.released.add(last)
            arrived_s = await _arrives(node, client, last, seen)
    usual = statistics.median(seen.back_s) if seen.back_s else 0.0
    says = (
        f"{len(seen.back_s)} of {kills} kills under {rate:.0f} calls/s, seed {seed}: {seen.answers} answers of "
        f"{len(seen.versions)} versions, {seen.nobody} calls found nobody; serves again after {usual:.1f} s (median); "
        f"the last release after {arrived_s:.1f} s; {len(seen.problems)} problems"
    )
    figures = {"kills": len(seen.back_s), "seed": seed, "answers": seen.answers, "versions": len(seen.versions)}
    return Result(part="node_kills", says=says, problems=seen.problems[:20], figures=figures)


async def _arrives(node: OneNode, client: AsyncClient, version: str, seen: Seen) -> float:
    started = time.monotonic()
    try:
        await node.until_serves(client, LINEAR, version)
    except TimeoutError as exc:
        seen.problems.append(str(exc))
    return time.monotonic() - started


@contextlib.asynccontextmanager
async def _releasing(releases: Releases, seen: Seen) -> AsyncIterator[None]:
    is_over = asyncio.Event()

    async def release() -> None:
        while not is_over.is_set():
            seen.released.add(await asyncio.to_thread(releases.release))
            await asyncio.sleep(PAUSE_S)

    task = asyncio.create_task(release())
    try:
        yield
    finally:
        is_over.set()
        await task


@contextlib.asynccontextmanager
async def _calling(client: AsyncClient, rate: float, seen: Seen) -> AsyncIterator[None]:
    calls: set[asyncio.Task[None]] = set()

    async def pace() -> None:
        start, number = time.monotonic(), 0
        while True:
            await asyncio.sleep(start + number / rate - time.monotonic())
            number += 1
            task = asyncio.create_task(_call(client, seen))
            calls.add(task)
            task.add_done_callback(calls.discard)

    pacing = asyncio.create_task(pace())
    try:
        yield
    finally:
        pacing.cancel()
        await asyncio.gather(pacing, *calls, return_exceptions=True)


async def _call(client: AsyncClient, seen: Seen) -> None:
    try:
        answer = await client.infer(LINEAR, {"x": X}, timeout_s=5.0)
    except OutriderError:  # dead, or not ready yet: an error is an answer too
        seen.nobody += 1
        return
    seen.answers += 1
    seen.versions.add(answer.version)
    if not np.allclose(answer.outputs["logits"], answer_of(answer.version), rtol=1e-5):
        seen.problems.append(f"version {answer.version} answers {answer.outputs['logits']}")
    if int(answer.version) > max(map(int, seen.released)) + 1:  # one more may be out before the publisher says so
        seen.problems.append(f"version {answer.version} was never released")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.node_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--rate", type=float, default=RATE, help="calls a second (%(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31), help="(random; printed)")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="outrider-node-kills-") as folder:
        result = asyncio.run(run(Path(folder), kills=args.kills, seed=args.seed, rate=args.rate))
    print(result.line())
    print(f"node_kills: {result.says}")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
