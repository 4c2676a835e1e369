"""The load of a soak: calls at a fixed rate through the Python client, each end remembered.

Four clients, each with its own order of endpoints, as four applications would have it. Most calls carry one fresh
digit; some carry a photo, as a file. Whatever happens to the processes, none of these calls has a reason to fail.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from common.errors import OutriderError
from edge import AsyncClient
from tests.system.running import Up

PHOTO_EVERY = 40  # calls
LATE_S = 60.0  # for the last answers, once no more calls are made
_KEPT = 20  # failures shown

# edge-b has no photos: with the gateway dead it could only answer 503, so it is not asked for them.
_DIGITS = (("edge-a", "edge-b", "gateway"), ("edge-b", "gateway", "edge-a"), ("gateway", "edge-a", "edge-b"))
_PHOTOS = ("edge-a", "gateway")


@dataclass
class Seen:
    """What came of the calls. `seconds`: of each one that was answered; `late`: not answered when all was over."""

    calls: int = 0
    late: int = 0
    failed: int = 0
    unstamped: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    targets: Counter[str] = field(default_factory=Counter)
    versions: Counter[str] = field(default_factory=Counter)

    def p(self, share: float) -> float:
        """Quantile of the answers' times in milliseconds; 0 without answers."""
        return 1000 * float(np.quantile(self.seconds, share)) if self.seconds else 0.0

    def fault(self, text: str) -> None:
        if len(self.failures) < _KEPT:
            self.failures.append(text)

    def problems(self) -> list[str]:
        counts = {"failed": self.failed, "unanswered": self.late, "without a stamp": self.unstamped}
        return [f"{count} of {self.calls} calls {what}" for what, count in counts.items() if count] + self.failures


class Load:
    """An async context: `rate` calls per second from entering to leaving, which waits for all answers."""

    def __init__(self, up: Up, rate: float, *, seed: int = 0) -> None:
        self._up, self._rate = up, rate
        self._rng = np.random.default_rng(seed)
        folder = up.bundles / "sources" / "efficientnet-lite0-v1" / "photos"
        self._photos = [path.read_bytes() for path in sorted(folder.iterdir())]
        random.Random(seed).shuffle(self._photos)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()
        self.seen = Seen()

    async def __aenter__(self) -> Self:
        addresses = {name: entry.get("grpc", "") for name, entry in self._up.processes().items()}
        self._digits = [await self._client([addresses[name] for name in order]) for order in _DIGITS]
        socket = self._up.state / "edge-a" / "grpc.sock"
        near = [f"unix:{socket}"] if socket.exists() else []
        self._for_photos = await self._client(near + [addresses[name] for name in _PHOTOS])
        for number in range(PHOTO_EVERY * len(self._photos)):  # each photo once: the cache has it from then on
            if _is_photo(number):
                await self._send(number)
        self._pacing = asyncio.create_task(self._pace(), name="load")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._pacing.cancel()
        await asyncio.gather(self._pacing, return_exceptions=True)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=LATE_S)
            self.seen.late = len(late)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._stack.aclose()

    async def _client(self, endpoints: Sequence[str]) -> AsyncClient:
        return await self._stack.enter_async_context(AsyncClient(endpoints))

    async def _pace(self) -> None:
        start = time.monotonic()
        for number in itertools.count():
            await asyncio.sleep(start + number / self._rate - time.monotonic())
            task = asyncio.create_task(self._call(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _call(self, number: int) -> None:
        seen, started = self.seen, time.monotonic()
        seen.calls += 1
        try:
            answer = await self._send(number)
        except OutriderError as exc:
            seen.failed += 1
            seen.fault(f"call {number}, {time.monotonic() - started:.2f} s: {type(exc).__name__}: {exc}")
            return
        seen.seconds.append(time.monotonic() - started)
        seen.targets[f"{answer.target} ({answer.by})"] += 1
        seen.versions[f"{answer.model}/{answer.version}"] += 1
        if not (answer.target and answer.model and answer.version and answer.by):
            seen.unstamped += 1
            seen.fault(f"call {number}: the stamp lacks something: {answer}")

    async def _send(self, number: int) -> Any:
        if _is_photo(number):
            photo = self._photos[number // PHOTO_EVERY % len(self._photos)]
            inputs = {"image": np.array([photo], dtype=object)}
            return await self._for_photos.infer("efficientnet-lite0", inputs, classes=3)
        pixels = self._rng.random((1, 1, 8, 8), dtype=np.float32)
        return await self._digits[number % len(self._digits)].infer("digits", {"pixels": pixels})


def _is_photo(number: int) -> bool:
    return number % PHOTO_EVERY == PHOTO_EVERY - 1


async def measure(up: Up, rate: float, seconds: float) -> Seen:
    async with Load(up, rate) as load:
        await asyncio.sleep(seconds)
    return load.seen


def digits_spec(bundles: Path, stage: str) -> Path:
    return bundles / "sources" / f"digits-{stage}" / "model.toml"
