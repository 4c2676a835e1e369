"""One device: one engine thread, one scheduler. The loop reads: pick a batch, run it, hand out the answers.

Everything but `Engine.run` happens on the event loop; the thread has its own queue and wakes the loop once per batch.
A cancelled caller leaves its batch quietly: its neighbours still get their answers.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import DeadlineExceeded, EngineError, Overloaded
from common.request import Context
from common.serving.engine import Batch, Engine, Outputs
from common.serving.scheduler import ClassScheduler, Item, Scheduler
from common.serving.slot import Lease
from common.telemetry.events import BatchDone, Hook, ignore
from common.tensors import Tensors


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting(Item):
    """A scheduler's item with what the device needs to answer it."""

    inputs: Tensors
    lease: Lease
    answer: asyncio.Future[Outputs]


@dataclass(frozen=True, slots=True)
class _Done:
    items: list[_Waiting]
    results: list[Outputs | Exception]
    seconds: float


class Device:
    """Runs batches on one thread. An async context: leaving it refuses new work, and ends the thread."""

    def __init__(
        self,
        name: str = "cpu",
        *,
        max_queue_rows: int = 256,
        scheduler: Scheduler | None = None,
        on_event: Hook = ignore,
    ) -> None:
        self.name, self.max_queue_rows = name, max_queue_rows
        self.scheduler = scheduler or ClassScheduler()
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"device-{name}", daemon=True)
        self._is_busy = False
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Device:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._jobs.put(None)
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.to_thread(self._thread.join, 30.0)

    @property
    def now(self) -> float:
        return time.monotonic()

    async def run(self, lease: Lease, inputs: Tensors, rows: int, context: Context) -> Outputs:
        """Queues one request and waits for its answer; releases the lease in every case.

        Raises `Overloaded` (queue full), `DeadlineExceeded` (at the deadline, or at once where it cannot be met) and
        `EngineError`.
        """
        loaded = lease.loaded
        try:
            if self.scheduler.queued_rows + rows > self.max_queue_rows:
                raise Overloaded(
                    f"device {self.name!r}",
                    queued=self.scheduler.queued_rows,
                    limit=self.max_queue_rows,
                    retry_after_s=self.scheduler.wait_s(context.priority, self.now),
                )
            item = _Waiting(
                id=next(self._ids),
                key=(id(loaded), *((name, a.dtype, a.shape[1:]) for name, a in sorted(inputs.items()))),
                rows=rows,
                priority=context.priority,
                deadline=context.deadline,
                latency=loaded.latency,
                max_rows=loaded.config.max_batch,
                inputs=inputs,
                lease=lease,
                answer=self._loop.create_future(),
            )
            if not self.scheduler.push(item, self.now):
                raise DeadlineExceeded(loaded.config.name, "or would have before the device could answer")
        except BaseException:
            lease.release()
            raise
        self._pump()
        try:
            return await item.answer
        finally:
            if not item.is_gone:  # cancelled while queued
                self.scheduler.cancel(item)
                lease.release()

    def close_engine(self, engine: Engine) -> None:
        """Closes an engine on the device's thread, behind what is running. Safe from any thread."""
        self._jobs.put(engine.close)

    def _pump(self) -> None:
        now = self.now
        for late in self.scheduler.expire(now):
            self._settle(late, DeadlineExceeded(_model(late), "while it was queued"))
        if not self._is_busy and (batch := self.scheduler.next(now)):
            self._is_busy = True
            items = [item for item in batch if isinstance(item, _Waiting)]
            self._jobs.put(lambda: self._run(items))
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake = self.scheduler.wake_at()
        if wake != float("inf"):
            self._timer = self._loop.call_later(max(0.0, wake - self.now) + 0.0005, self._pump)

    def _finish(self, done: _Done) -> None:
        """Back on the loop: the next batch starts before these answers go out."""
        self._is_busy = False
        rows = sum(item.rows for item in done.items)
        self.scheduler.done([*done.items], done.seconds, self.now)
        self._pump()
        for item, result in zip(done.items, done.results, strict=True):
            self._settle(item, result)
        model = done.items[0].lease.loaded.config.name
        self._on_event(BatchDone(model=model, rows=rows, items=len(done.items), seconds=done.seconds))

    def _settle(self, item: Item, result: Outputs | Exception) -> None:
        assert isinstance(item, _Waiting)
        item.lease.release()
        if item.answer.done():  # the caller left
            return
        if isinstance(result, Exception):
            item.answer.set_exception(result)
        else:
            item.answer.set_result(result)

    # --- on the device's thread ---

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _run(self, items: list[_Waiting]) -> None:
        start = time.monotonic()
        results = _run_engine(items)
        done = _Done(items, results, time.monotonic() - start)
        try:
            self._loop.call_soon_threadsafe(self._finish, done)
        except RuntimeError:  # the loop ended while the batch ran: nobody is waiting any more
            for item in items:
                item.lease.release()


def _run_engine(items: list[_Waiting]) -> list[Outputs | Exception]:
    """One outcome per item, whatever the engine does."""
    loaded = items[0].lease.loaded
    try:
        batch = Batch(tuple(item.inputs for item in items), sum(item.rows for item in items))
        results = loaded.engine.run(batch)
    except Exception as exc:
        return [EngineError(loaded.config.name, f"{type(exc).__name__}: {exc}") for _ in items]
    if len(results) != len(items):
        return [EngineError(loaded.config.name, f"{len(results)} answers for {len(items)} requests") for _ in items]
    return [_checked(item, result) for item, result in zip(items, results, strict=True)]


def _checked(item: _Waiting, result: Outputs | Exception) -> Outputs | Exception:
    name = item.lease.loaded.config.name
    if isinstance(result, EngineError):
        return result
    if isinstance(result, Exception):
        return EngineError(name, f"{type(result).__name__}: {result}")
    for output, array in result.items():
        if array.ndim == 0 or array.shape[0] != item.rows:
            return EngineError(name, f"output {output!r} has shape {list(array.shape)} for {item.rows} rows")
    return result


def _model(item: Item) -> str:
    assert isinstance(item, _Waiting)
    return item.lease.loaded.config.name
