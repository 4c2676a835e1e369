"""The load of a soak: calls at a fixed rate through the Python client, each end remembered.

Four clients, each with its own order of endpoints, as four applications would have it. Most calls carry one fresh
digit; some carry a photo, as a file. Whatever happens to the processes, none of these calls has a reason to fail, and
the books must balance: the calls that the rate asks for were made, and each of them ended one way or the other.
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
from typing import Self

import numpy as np

from edge.client import AsyncClient
from edge.client.caller import Answer
from tests.soak.truth import KEPT_EVERY, Truth
from tests.system.running import Up

PHOTO_EVERY = 40  # calls
CALL_S = 10.0  # after which a call counts as stuck: it failed
STALL_S = 5.0  # of the longest call where nothing is killed
MADE_SHARE = 0.9  # of the calls that the rate asks for
LATE_S = 60.0  # for the last answers, once no more calls are made
_KEPT = 20  # failures shown

# edge-b has no photos: with the gateway dead it could only answer 503, so it is not asked for them.
_DIGITS = (("edge-a", "edge-b", "gateway"), ("edge-b", "gateway", "edge-a"), ("gateway", "edge-a", "edge-b"))
_PHOTOS = ("edge-a", "gateway")


@dataclass
class Seen:
    """What came of the calls. `seconds`: of each one that was answered; `late`: given up when all was over; `due`: the
    calls that the rate asks for; `broken`: what is wrong with the load itself."""

    longest_s: float = CALL_S  # of the answered calls, at most
    due: float = 0.0
    calls: int = 0
    late: int = 0
    failed: int = 0
    unstamped: int = 0
    broken: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    when: Counter[tuple[int, str]] = field(default_factory=Counter)  # failures by tens of seconds and kind of call
    targets: Counter[str] = field(default_factory=Counter)
    versions: Counter[str] = field(default_factory=Counter)

    def p(self, share: float) -> float:
        """Quantile of the answers' times in milliseconds; 0 without answers."""
        return 1000 * float(np.quantile(self.seconds, share)) if self.seconds else 0.0

    def fault(self, text: str) -> None:
        if len(self.failures) < _KEPT:
            self.failures.append(text)

    def problems(self) -> list[str]:
        found = list(self.broken)
        if not self.calls:
            found.append("no call was made")
        elif self.calls < MADE_SHARE * self.due:
            found.append(f"only {self.calls} calls were made of the {self.due:.0f} that the rate asks for")
        ended = len(self.seconds) + self.failed + self.late
        if ended != self.calls:
            found.append(f"{self.calls} calls, but {ended} ended: answered, failed or given up")
        counts = {"failed": self.failed, "unanswered": self.late, "without a stamp": self.unstamped}
        found += [f"{count} of {self.calls} calls {what}" for what, count in counts.items() if count]
        if self.errors:
            found.append("failed with " + ", ".join(f"{name} ({count})" for name, count in self.errors.most_common()))
        if self.when:
            found.append("begun at " + ", ".join(f"{at} s {what} ({n})" for (at, what), n in sorted(self.when.items())))
        if slow := sum(seconds > self.longest_s for seconds in self.seconds):
            found.append(f"{slow} calls took more than {self.longest_s:g} s, the longest {self.p(1.0) / 1000:.1f} s")
        return found + self.failures


class Load:
    """An async context: `rate` calls per second from entering to leaving, which waits for all answers.

    `longest_s`: a longer call is a problem. `truth` has the answers to compare, afterwards.
    """

    def __init__(self, up: Up, rate: float, *, seed: int = 0, longest_s: float = CALL_S) -> None:
        self._up, self._rate = up, rate
        self._rng = np.random.default_rng(seed)
        folder = up.bundles / "sources" / "efficientnet-lite0-v1" / "photos"
        self._photos = [path.read_bytes() for path in sorted(folder.iterdir())]
        random.Random(seed).shuffle(self._photos)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()
        self.seen, self.truth = Seen(longest_s=longest_s), Truth(up.bundles)

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
        is_over = self._pacing.done()
        self._pacing.cancel()
        (end,) = await asyncio.gather(self._pacing, return_exceptions=True)
        if is_over or not isinstance(end, asyncio.CancelledError):
            self.seen.broken.append(f"the pacing of the calls ended before its time: {end!r}")
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=LATE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._stack.aclose()

    async def _client(self, endpoints: Sequence[str]) -> AsyncClient:
        return await self._stack.enter_async_context(AsyncClient(endpoints))

    async def _pace(self) -> None:
        start = time.monotonic()
        try:
            for number in itertools.count():
                await asyncio.sleep(start + number / self._rate - time.monotonic())
                self.seen.calls += 1
                task = asyncio.create_task(self._call(number))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            self.seen.due = self._rate * (time.monotonic() - start)

    async def _call(self, number: int) -> None:
        """Whatever it raises, the call failed; only one that is given up at the end is `late` instead."""
        seen, started = self.seen, time.monotonic()
        try:
            async with asyncio.timeout(CALL_S):
                answer = await self._send(number)
            stamp = (answer.target, answer.model, answer.version, answer.by)
        except (Exception, asyncio.CancelledError) as exc:
            task = asyncio.current_task()
            if isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling():
                seen.late += 1
                raise
            seen.failed += 1
            seen.errors[type(exc).__name__] += 1
            seen.when[10 * int(number / self._rate / 10), "photo" if _is_photo(number) else f"way {number % 3}"] += 1
            seen.fault(f"call {number}, {time.monotonic() - started:.2f} s: {type(exc).__name__}: {exc}")
            return
        seen.seconds.append(time.monotonic() - started)
        seen.targets[f"{answer.target} ({answer.by})"] += 1
        seen.versions[f"{answer.model}/{answer.version}"] += 1
        if not all(stamp):
            seen.unstamped += 1
            seen.fault(f"call {number}: the stamp lacks something: {answer}")

    async def _send(self, number: int) -> Answer:
        """One call; its answer is kept to be compared: a photo's always, a digit's now and then."""
        if _is_photo(number):
            photo = self._photos[number // PHOTO_EVERY % len(self._photos)]
            inputs = {"image": np.array([photo], dtype=object)}
            answer = await self._for_photos.infer("efficientnet-lite0", inputs, classes=3)
            self.truth.photo(photo, answer)
            return answer
        pixels = self._rng.random((1, 1, 8, 8), dtype=np.float32)
        answer = await self._digits[number % len(self._digits)].infer("digits", {"pixels": pixels})
        if number % KEPT_EVERY == 0:
            self.truth.digit(pixels, answer)
        return answer


def _is_photo(number: int) -> bool:
    return number % PHOTO_EVERY == PHOTO_EVERY - 1


async def measure(up: Up, rate: float, seconds: float) -> Seen:
    async with Load(up, rate) as load:
        await asyncio.sleep(seconds)
    return load.seen


def digits_spec(bundles: Path, stage: str) -> Path:
    return bundles / "sources" / f"digits-{stage}" / "model.toml"
