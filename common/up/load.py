"""A steady load beside other work: calls at a fixed rate whatever the answers take, each one's end remembered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from common.errors import OutriderError
from common.tensors import Array
from common.up.client import Client
from common.up.demo import DIGITS

_SETTLE_S = 1.0


class Load:
    """An async context: calls `bases` in turn with one digit each, `rate` per second. Leaving it waits for all answers.

    `digits` is float32 [n, 1, 8, 8].
    """

    def __init__(self, client: Client, bases: Sequence[str], digits: Array, rate: float) -> None:
        self._client, self._bases, self._digits, self._rate = client, bases, digits, rate
        self.calls = 0
        self.failures: list[str] = []
        self.versions: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._pacing = asyncio.create_task(self._pace(), name="load")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._pacing.cancel()
        await asyncio.gather(self._pacing, *self._tasks, return_exceptions=True)

    async def settle(self) -> None:
        """Goes on a little longer."""
        await asyncio.sleep(_SETTLE_S)

    async def _pace(self) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        for number in itertools.count():
            await asyncio.sleep(start + number / self._rate - loop.time())
            task = asyncio.create_task(self._call(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _call(self, number: int) -> None:
        self.calls += 1
        digit = self._digits[number % len(self._digits)][None]
        try:
            answer = await self._client.infer(self._bases[number % len(self._bases)], DIGITS.name, {"pixels": digit})
            self.versions.add(answer.version)
        except OutriderError as exc:
            self.failures.append(str(exc))
