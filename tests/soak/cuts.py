"""A link that breaks: TCP connections reset at random bytes while a release is fetched, counted at the agent's socket.

What is lost of the payload at each cut comes a second time; that, the frames and the handshakes may cost 2 %.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import numpy as np

from sync.agent.client import GrpcSource
from sync.agent.fetch import Assembly, Fetched
from sync.agent.journal import Release
from sync.agent.local import LocalSlabs, verify_files
from sync.service import ServiceConfig
from tests.proxy import Proxy, proxy
from tests.soak.result import Result
from tests.sync.fakes import World, running

MOST: Final = 1.02
_ROW: Final = 4096


class Cutter(Proxy):
    """Cuts `most` connections, each somewhere around `mean` bytes of answers."""

    def arm(self, most: int, mean: float, rng: random.Random) -> None:
        self._points = [int(mean * (0.5 + rng.random())) for _ in range(most)]

    @property
    def cut_after(self) -> int | None:  # type: ignore[override]
        points = getattr(self, "_points", [])
        return points[self.cuts] if self.cuts < len(points) else None

    @cut_after.setter
    def cut_after(self, value: int | None) -> None:
        pass


@contextlib.contextmanager
def cutter(target: str) -> Iterator[Cutter]:
    """On a loop in a thread of its own."""
    loop, stopped, started = asyncio.new_event_loop(), asyncio.Event(), Future[Proxy]()

    async def serve() -> None:
        async with proxy(target, Cutter) as one:
            started.set_result(one)
            await stopped.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="cutter")
    thread.start()
    try:
        one = started.result(10)
        assert isinstance(one, Cutter)
        yield one
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(10)
        loop.close()


def run(
    *, megabytes: int = 256, cuts: int = 200, seed: int = 0, folder: Path | None = None, spare_bytes: int = 0
) -> Result:
    """A release in full, then one as a difference to it: `megabytes` of slabs each, `cuts` cuts each.

    `spare_bytes`: what may come beyond the 2 %, where there are too few cuts for the first one not to weigh: until then
    the link is taken for a good one.
    """
    with contextlib.ExitStack() as stack:
        folder = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-cuts-")))
        world, rng = World(folder), np.random.default_rng(seed)
        rows = int(megabytes * 1.15 * (1 << 20)) // (4 * _ROW)  # in full it comes compressed by that much
        first = rng.normal(size=(rows, _ROW)).astype(np.float32)
        second = first * (1 + rng.normal(scale=1e-2, size=first.shape).astype(np.float32))
        for tensor in (first, second):
            world.publish({"w": tensor})
        address = stack.enter_context(running(ServiceConfig(store=str(world.store.root))))
        figures: dict[str, Any] = {}
        known: list[tuple[Release, Path]] = []
        for version, name in (("1", "full"), ("2", "delta")):
            manifest = world.publisher.manifest("digits", version)
            assert manifest is not None
            one = Release(manifest=manifest, variant="full", engine="onnxruntime")
            figures[name] = _fetched(one, folder / name, known, address, random.Random(seed), cuts, spare_bytes)
            known.append((one, folder / name))
    problems = [f"{name}: {problem}" for name, each in figures.items() for problem in each.pop("problems")]
    says = ", ".join(
        f"{each['cuts']} cuts over {each['payload_bytes'] / 1e6:.1f} MB ({name}): {each['ratio']:.4f} x"
        for name, each in figures.items()
    )
    return Result(part="cuts", says=says, problems=problems, figures=figures)


def _fetched(
    one: Release,
    folder: Path,
    known: list[tuple[Release, Path]],
    address: str,
    rng: random.Random,
    cuts: int,
    spare_bytes: int,
) -> dict[str, Any]:
    """First without a cut, which says how many bytes there are, then with all of them."""
    plain, cut = Fetched(), Fetched()
    with cutter(address) as link:
        _assemble(one, folder.with_name(f"{folder.name}-plain"), known, link, plain)
        payload = sum(plain.bytes_by_form.values())
    with cutter(address) as link:
        link.arm(cuts, 0.95 * payload / (cuts + 1), rng)
        started = time.monotonic()
        _assemble(one, folder, known, link, cut)
        seconds = time.monotonic() - started
        ratio, made = link.answer_bytes / payload, link.cuts
    problems = []
    if link.answer_bytes > MOST * payload + spare_bytes:
        problems.append(f"{ratio:.4f} times the payload came in, at most {MOST} may")
    if made < cuts:
        problems.append(f"only {made} of {cuts} cuts were made")
    if cut.fallbacks or set(cut.bytes_by_form) != set(plain.bytes_by_form):
        problems.append(f"forms changed: {dict(plain.bytes_by_form)} without cuts, {dict(cut.bytes_by_form)} with them")
    if (damage := verify_files(one, folder)) is not None:
        problems.append(damage)
    return {
        "payload_bytes": payload,
        "socket_bytes": link.answer_bytes,
        "ratio": round(ratio, 5),
        "cuts": made,
        "connections": link.connections,
        "seconds": round(seconds, 2),
        "forms": dict(cut.bytes_by_form),
        "problems": problems,
    }


def _assemble(one: Release, folder: Path, known: list[tuple[Release, Path]], link: Cutter, result: Fetched) -> None:
    folder.mkdir()
    source = GrpcSource(link.address, timeout_s=60.0)
    try:
        Assembly(one, folder, LocalSlabs(known)).run(source, result)
    finally:
        source.close()
