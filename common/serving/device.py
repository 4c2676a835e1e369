"""One device: one engine thread, one scheduler. The loop reads: pick a batch, run it, hand out the answers.

Everything but `Engine.run` happens on the event loop; the thread has its own queue and wakes the loop once per batch.
A batch that is predicted to take less than `inline_below_s` runs on the loop itself, where the way to the thread and
back would cost more: the price is that nothing else happens meanwhile, not even another caller's deadline.
Every caller hears something by its deadline, whatever the engine does. A cancelled caller leaves its batch quietly: its
neighbours still get their answers. An engine that does not come back is given up, with the thread that it holds: those
who wait for it are told, the others are served on a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator

from common.errors import DeadlineExceeded, EngineError, Overloaded, Unavailable
from common.request import Context, Priority
from common.serving.batches import run_batch
from common.serving.engine import Engine, Outputs
from common.serving.engine_thread import EngineThread, Ran
from common.serving.scheduler import ClassScheduler, Item, Scheduler
from common.serving.slot import Lease, LoadedEngine
from common.telemetry.events import BatchDone, EngineHung, Hook, ignore
from common.tensors import Tensors

_log = logging.getLogger(__name__)
_HANG_FACTOR = 20.0  # times what a batch is expected to take
_CLOSE_S = 5.0  # for the batch that runs when the device is closed


class _Waiting(Item, kw_only=True, eq=False):
    """A scheduler's item with what the device needs to answer it."""

    inputs: Tensors
    lease: Lease
    model: str
    answer: asyncio.Future[Outputs] = None  # type: ignore[assignment]  # made once it has to wait


class Device:
    """Runs batches on one thread. An async context: leaving it fails what is queued, and ends the thread."""

    def __init__(
        self,
        name: str = "cpu",
        *,
        max_queue_rows: int = 256,
        inline_below_s: float = 0.0,
        hang_after_s: float = 30.0,
        scheduler: Scheduler | None = None,
        on_event: Hook = ignore,
        on_hang: Callable[[LoadedEngine], None] = lambda _: None,
    ) -> None:
        """`hang_after_s`: a batch that takes longer, and longer than twenty times what was expected, hangs; `on_hang`
        is told, on the loop, whose engine that was."""
        self.name, self.max_queue_rows = name, max_queue_rows
        self._inline_below_s, self._hang_after_s, self._on_hang = inline_below_s, hang_after_s, on_hang
        self.scheduler = scheduler or ClassScheduler()
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._thread = self._new_thread()
        self._handing_over = threading.Lock()
        self._queued: dict[int, _Waiting] = {}
        self._preparing = dict.fromkeys(Priority, 0)  # rows that are on their way into the queue
        self._running: list[_Waiting] = []  # late ones among them are answered without waiting for the engine
        self._hangs_at = math.inf  # what runs
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf

    async def __aenter__(self) -> Device:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for item in list(self._queued.values()):
            self.scheduler.cancel(item)
            self._settle(item, Unavailable(f"device {self.name!r} is closing"))
        await asyncio.to_thread(self._thread.end, _CLOSE_S)
        await asyncio.sleep(0)  # the last batch hands out its answers
        if self._running:
            _log.error("device %r is still busy after %g s; it ends with the process", self.name, _CLOSE_S)
            for item in self._running:
                _answer(item, EngineError(item.model, "still running when the device was closed"))

    @property
    def now(self) -> float:
        return time.monotonic()

    def rows_ahead(self, priority: Priority) -> int:
        """Rows that go before a new request of this class, those still being prepared included."""
        ahead = self.scheduler.rows_ahead(priority)
        for other, rows in self._preparing.items():
            if rows and other <= priority:
                ahead += rows
        return ahead

    @contextlib.contextmanager
    def preparing(self, model: str, rows: int, context: Context) -> Iterator[None]:
        """Room in the queue for rows whose inputs are still being made. Raises as `run` does for a full queue."""
        self._admit(model, rows, context)
        self._preparing[context.priority] += rows
        try:
            yield
        finally:
            self._preparing[context.priority] -= rows

    async def run(self, lease: Lease, inputs: Tensors, rows: int, context: Context) -> Outputs:
        """Queues one request and waits for its answer; releases the lease in every case.

        Raises `Overloaded` (queue full), `DeadlineExceeded` (at the deadline, or at once where it cannot be met),
        `EngineError`, or `Unavailable` when the device is closed.
        """
        try:
            item = self._item(lease, inputs, rows, context)
            now = self._admit(item.model, rows, context)
            is_next = self.scheduler.start(item, now)
            if not is_next and not self.scheduler.push(_with_key(item), now):
                raise DeadlineExceeded(item.model, "or would have before the device could answer")
        except BaseException:
            lease.release()
            raise
        if is_next and item.latency.seconds(rows, now) < self._inline_below_s:
            return self._run_inline(item, now)
        item.answer = self._loop.create_future()
        if is_next:
            self._start([item], now)
            self._set_timer()
        else:
            self._queued[item.id] = item
            self._pump()
        try:
            return await item.answer
        finally:
            if not item.is_gone:  # cancelled while queued
                self.scheduler.cancel(item)
                self._settle(item, Unavailable("cancelled"))

    def close_engine(self, engine: Engine) -> None:
        """Closes an engine on the device's thread, behind what is running. Safe from any thread."""
        with self._handing_over:
            self._thread.call(engine.close)

    def _item(self, lease: Lease, inputs: Tensors, rows: int, context: Context) -> _Waiting:
        loaded = lease.loaded
        return _Waiting(
            id=next(self._ids),
            rows=rows,
            priority=context.priority,
            deadline=context.deadline,
            latency=loaded.latency,
            max_rows=loaded.config.max_batch,
            inputs=inputs,
            lease=lease,
            model=loaded.config.name,
        )

    def _admit(self, model: str, rows: int, context: Context) -> float:
        """The time now. A class is refused for what its own and more urgent classes have queued, never for a flood
        below it."""
        if self._is_closed:
            raise Unavailable(f"device {self.name!r} is closed")
        now = self.now
        if context.deadline <= now:
            raise DeadlineExceeded(model, "before it was queued")
        ahead = self.rows_ahead(context.priority)
        if ahead + rows > self.max_queue_rows:
            wait_s = self.scheduler.wait_s(context.priority, now)
            raise Overloaded(f"device {self.name!r}", queued=ahead, limit=self.max_queue_rows, retry_after_s=wait_s)
        return now

    def _run_inline(self, item: _Waiting, start: float) -> Outputs:
        [result], is_usual = _run_engine([item])
        now = self.now
        self.scheduler.done([item], now - start, now, is_usual=is_usual)
        item.lease.release()
        self._on_event(BatchDone(model=item.model, rows=item.rows, items=1, seconds=now - start))
        item.lease.loaded.tally.count(result)
        if isinstance(result, Exception):
            raise result
        return result

    def _start(self, items: list[_Waiting], now: float) -> None:
        self._running = items
        expected_s = items[0].latency.seconds(sum(item.rows for item in items), now)
        self._hangs_at = now + max(self._hang_after_s, _HANG_FACTOR * expected_s)
        self._thread.put(items)

    def _pump(self) -> None:
        now = self.now
        self._expire(now)
        if self._running and now >= self._hangs_at:
            self._give_up(now)
        for item in self._running:
            if item.deadline <= now:
                _answer(item, DeadlineExceeded(item.model, "while the engine was running"))
        if not self._running and not self._is_closed and (batch := self.scheduler.next(now)):
            items = [_waiting(item) for item in batch]
            for item in items:
                del self._queued[item.id]
            self._start(items, now)
            self._expire(now)
        self._set_timer()

    def _give_up(self, now: float) -> None:
        """The engine that runs has not come back. Its leases stay: it may still be at work on what they hold."""
        hung, self._running, self._hangs_at = self._running, [], math.inf
        loaded, model = hung[0].lease.loaded, hung[0].model
        _log.error("the engine of model %r hangs on device %r: it is given up, with its thread", model, self.name)
        with self._handing_over:
            old, self._thread = self._thread, self._new_thread()
            self._thread.start()
            old.hand_over(self._thread)
        self.scheduler.done([*hung], 0.0, now, is_usual=False)
        error = EngineError(model, "it has not come back")
        for item in hung:
            loaded.tally.count(error)
            _answer(item, error)
        for item in [one for one in self._queued.values() if one.lease.loaded is loaded]:
            self.scheduler.cancel(item)
            self._settle(item, error)
        self._on_event(EngineHung(model=model, version=loaded.version))
        self._on_hang(loaded)

    def _new_thread(self) -> EngineThread[list[_Waiting]]:
        return EngineThread(self.name, _run_engine, self._ran)

    def _ran(self, thread: EngineThread[list[_Waiting]], items: list[_Waiting], ran: Ran, seconds: float) -> None:
        if thread is self._thread:
            self._finish(items, *ran, seconds)
            return
        _log.warning("the engine of model %r came back after %.1f s, too late", items[0].model, seconds)
        for item in items:
            item.inputs = {}
            item.lease.release()

    def _expire(self, now: float) -> None:
        for late in self.scheduler.expire(now):
            self._settle(late, DeadlineExceeded(_waiting(late).model, "or would have before the device came to it"))

    def _set_timer(self) -> None:
        """A timer for the first deadline. One that is set for earlier stays: it will look again."""
        wake = self.scheduler.wake_at()
        if self._running and self._hangs_at < wake:
            wake = self._hangs_at
        for item in self._running:
            if item.deadline < wake and not item.answer.done():
                wake = item.deadline
        if wake == math.inf or wake >= self._wakes_at or self._is_closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = wake
        self._timer = self._loop.call_later(max(0.0, wake - self.now) + 0.0005, self._wake)

    def _wake(self) -> None:
        self._timer, self._wakes_at = None, math.inf
        self._pump()

    def _finish(
        self, items: list[_Waiting], results: list[Outputs | Exception], is_usual: bool, seconds: float
    ) -> None:
        """Back on the loop: the next batch starts before these answers go out."""
        self._running = []
        self.scheduler.done([*items], seconds, self.now, is_usual=is_usual)
        if self._queued:
            self._pump()
        rows, tally = 0, items[0].lease.loaded.tally
        for item, result in zip(items, results, strict=True):
            rows += item.rows
            tally.count(result)
            self._settle(item, result)
        self._on_event(BatchDone(model=items[0].model, rows=rows, items=len(items), seconds=seconds))

    def _settle(self, item: Item, result: Outputs | Exception) -> None:
        """The end of an item: its answer, its lease, and the memory of its inputs."""
        waiting = _waiting(item)
        self._queued.pop(waiting.id, None)
        waiting.inputs = {}
        waiting.lease.release()
        _answer(waiting, result)


def _with_key(item: _Waiting) -> _Waiting:
    """Only what queues needs one: equal engines, dtypes and row shapes may share a batch."""
    loaded = item.lease.loaded
    item.key = (id(loaded), *((name, a.dtype, a.shape[1:]) for name, a in sorted(item.inputs.items())))
    return item


def _waiting(item: Item) -> _Waiting:
    assert isinstance(item, _Waiting)
    return item


def _answer(item: _Waiting, result: Outputs | Exception) -> None:
    if item.answer.done():  # the caller left, or has heard already
        return
    if isinstance(result, Exception):
        item.answer.set_exception(result)
    else:
        item.answer.set_result(result)


def _run_engine(items: list[_Waiting]) -> Ran:
    return run_batch(items[0].model, items[0].lease.loaded.engine, [(item.inputs, item.rows) for item in items])
