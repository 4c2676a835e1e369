"""The thread that touches a device: batches and whatever else engines are called for, one after another.

Owns its queue; the event loop is woken once per batch. A thread whose engine hangs cannot be ended: it is left behind
(`hand_over`), and ends by itself if the engine ever comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from common.serving.engine import Outputs

_log = logging.getLogger(__name__)
B = TypeVar("B")

Ran = tuple[list[Outputs | Exception], bool]


class EngineThread(Generic[B]):
    """`run`: one batch, on the thread. `finished`: on the loop, with the batch, its outcome and its seconds."""

    def __init__(self, name: str, run: Callable[[B], Ran], finished: Callable[[EngineThread[B], B, Ran, float], None]):
        self.name, self._run, self._finished = name, run, finished
        self._jobs: queue.SimpleQueue[tuple[B] | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"device-{name}", daemon=True)

    def start(self) -> None:
        """On the loop that is to hear of what is finished."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def put(self, batch: B) -> None:
        self._jobs.put((batch,))

    def call(self, job: Callable[[], None]) -> None:
        """Behind what is running. Safe from any thread."""
        self._jobs.put(job)

    def end(self, within_s: float) -> None:
        """After what is queued; waits for it."""
        self._jobs.put(None)
        self._thread.join(within_s)

    def hand_over(self, to: EngineThread[B]) -> None:
        """What waits behind a batch that hangs goes to another thread; this one ends when it can."""
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    to._jobs.put(job)
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if isinstance(job, tuple):
                    start = time.monotonic()
                    ran = self._run(job[0])
                    seconds = time.monotonic() - start
                    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is waiting any more
                        self._loop.call_soon_threadsafe(self._finished, self, job[0], ran, seconds)
                else:
                    job()
            except BaseException:  # an engine that cannot be closed must not end the thread that runs the others
                _log.exception("a job on device %r failed", self.name)
