"""A few threads for work that comes before the engine (decoding pictures): most urgent class first, nothing too late.

The same class and deadline as in the engine's queue hold here. Owns its threads; knows nothing of pictures.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from common.errors import DeadlineExceeded
from common.request import Context

T = TypeVar("T")


@dataclass(order=True, slots=True)
class _Job:
    priority: int
    deadline: float
    order: int
    run: Callable[[], None] | None = field(compare=False)


class Decoders:
    """An async context; leaving it ends the threads after the job that each is at."""

    def __init__(self, threads: int = 2) -> None:
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._order = itertools.count()
        self._threads = [
            threading.Thread(target=self._work, name=f"decode-{number}", daemon=True) for number in range(threads)
        ]

    async def __aenter__(self) -> Decoders:
        for thread in self._threads:
            thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for _thread in self._threads:
            self._jobs.put(_Job(0, float("-inf"), next(self._order), None))

    async def run(self, work: Callable[[], T], model: str, context: Context) -> T:
        """`work`'s result. Raises what it raises, and `DeadlineExceeded` at the deadline."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            if answer.cancelled():
                return
            try:
                if context.deadline <= time.monotonic():
                    raise DeadlineExceeded(model, "before its input was decoded")
                result, problem = work(), None
            except Exception as exc:
                result, problem = None, exc
            loop.call_soon_threadsafe(_settle, answer, result, problem)

        self._jobs.put(_Job(context.priority, context.deadline, next(self._order), job))
        remaining = context.deadline - time.monotonic()
        try:
            async with asyncio.timeout(None if remaining == float("inf") else max(0.0, remaining)):
                return await answer
        except TimeoutError as exc:
            raise DeadlineExceeded(model, "while its input was decoded") from exc

    def _work(self) -> None:
        while (job := self._jobs.get()).run is not None:
            job.run()


def _settle(answer: asyncio.Future[T], result: T | None, problem: Exception | None) -> None:
    if answer.done():
        return
    if problem is not None:
        answer.set_exception(problem)
    else:
        answer.set_result(result)  # type: ignore[arg-type]
