"""What the device does next: a pure object, no I/O, time is an argument (monotonic seconds).

Work-conserving: it never waits while the device is idle, the batching window is the time the device is busy. Strict
class order. Within a class the engines share the device's time evenly (start-time fair queueing, Goyal et al., 1996):
the backlog of one never starves another; earliest due time first within that. A batch takes no longer than half the
latency target of the most urgent class that is served here: nothing can break in on it. What can no longer be done in
time is given back at once, never run. Behind a backlog of more than a batch, what could only be answered by a smaller
batch is passed over: else what is nearly late would cut every batch to a row or two, and the backlog would never end.
Counts are rows, not requests.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable
from typing import Protocol

import msgspec

from common.request import SLA_S, Priority
from common.serving.latency import LatencyModel

_PATIENCE_S = 60.0  # due time of a request whose class has no latency target: it is not passed over for ever
_SERVED_S = 10.0  # since its last request: for so long a class counts as served here
_LOOK_PAST = 64  # items that do not fit into a batch and are passed over in search of one that does


class Item(msgspec.Struct, kw_only=True, eq=False):
    """One queued request. Only items with an equal `key` (engine, dtypes, row shapes) share a batch."""

    id: int
    key: Hashable = None
    rows: int
    priority: Priority
    deadline: float
    latency: LatencyModel  # of the engine that the request is pinned to
    max_rows: int
    is_gone: bool = False  # left the queue: taken, cancelled or expired


class Scheduler(Protocol):
    def push(self, item: Item, now: float) -> bool:
        """Queues an item; False where it cannot be answered by its deadline however soon it runs."""
        ...

    def start(self, item: Item, now: float) -> bool:
        """The short way of an item that finds the device idle and nothing queued: True where it is the next batch.

        What `push` and `next` would come to. The item needs no key; False leaves it as it was.
        """
        ...

    def cancel(self, item: Item) -> None: ...

    def expire(self, now: float) -> list[Item]:
        """Removes what can no longer make its deadline: it gets its error now, not when the device is free."""
        ...

    def wake_at(self) -> float:
        """When `expire` has something to do next; infinite where nothing queued has a deadline."""
        ...

    def next(self, now: float) -> list[Item]:
        """The next batch for an idle device, most urgent first; empty when nothing is queued."""
        ...

    def rows_ahead(self, priority: Priority) -> int:
        """Queued rows that would be served before a new item of this class."""
        ...

    def wait_s(self, priority: Priority, now: float) -> float:
        """Seconds until the device would start on a new item of this class."""
        ...

    def done(self, batch: list[Item], elapsed: float, now: float) -> None: ...


class ClassScheduler:
    def __init__(self) -> None:
        self._order = itertools.count()
        self._queues: dict[Priority, dict[Hashable, _Queue]] = {priority: {} for priority in Priority}
        self._expiry = _Queue()
        self._rows = dict.fromkeys(Priority, 0)
        self._queued = 0  # items
        self._work_s = dict.fromkeys(Priority, 0.0)  # predicted seconds of what is queued
        self._cost_s: dict[int, float] = {}  # what each queued item added to that
        self._started_at: float | None = None  # of the batch that runs
        self._busy_until = 0.0
        self._seen_at = dict.fromkeys(Priority, -math.inf)  # last request of each class
        self._round = 0.0  # start tag of the last batch: seconds of device time, of an engine that always had its share
        self._shares: dict[int, float] = {}  # by engine: what it has had, counted from the rounds it took part in

    def push(self, item: Item, now: float) -> bool:
        takes = item.latency.seconds(item.rows, now)
        if item.deadline <= now or (item.deadline < now + takes and not self._is_idle):
            return False
        order = next(self._order)
        due = min(item.deadline, now + min(SLA_S[item.priority], _PATIENCE_S))
        queue = self._queues[item.priority].setdefault(item.key, _Queue())
        queue.push(due, order, item)
        queue.rows += item.rows
        if not math.isinf(item.deadline):
            last_start = item.deadline - takes
            self._expiry.push(last_start if last_start > now else item.deadline, order, item)
        self._seen_at[item.priority] = now
        self._rows[item.priority] += item.rows
        self._queued += 1
        self._cost_s[item.id] = item.latency.queued(item.rows, self._cap(item, now), now)
        self._work_s[item.priority] += self._cost_s[item.id]
        return True

    def start(self, item: Item, now: float) -> bool:
        if self._queued or self._started_at is not None or item.deadline <= now:
            return False
        item.is_gone = True
        self._seen_at[item.priority] = self._started_at = now
        self._busy_until = now + item.latency.seconds(item.rows, now)
        return True

    def cancel(self, item: Item) -> None:
        if not item.is_gone:
            self._take_out(item)
            self._queue_of(item).has_left()

    def expire(self, now: float) -> list[Item]:
        late: list[Item] = []
        while (first := self._expiry.first()) is not None and first[0] < now:
            item = self._expiry.pop()
            self._take_out(item, expired=True)
            self._queue_of(item).has_left()
            late.append(item)
        return late

    def wake_at(self) -> float:
        first = self._expiry.first()
        return first[0] if first is not None else math.inf

    def next(self, now: float) -> list[Item]:
        batch: list[Item] = []
        rows = 0
        if not self._queued:
            return batch
        aside: list[tuple[_Queue, list[_Entry]]] = []
        for priority in [one for one, queued in self._rows.items() if queued]:  # most urgent first
            if not batch and (batch := self._head(priority, now, aside)):
                rows = batch[0].rows
            if batch:
                rows = self._fill(batch, rows, priority, now)
        for queue, passed_over in aside:
            queue.put_back(passed_over)
        if batch:
            self._round = self._share(batch[0])
            self._started_at = now
            self._busy_until = now + batch[0].latency.seconds(rows, now)
        return batch

    def rows_ahead(self, priority: Priority) -> int:
        if not self._queued:
            return 0
        return sum(rows for other, rows in self._rows.items() if other <= priority)

    def wait_s(self, priority: Priority, now: float) -> float:
        if not self._queued:
            return self._busy_s(now)
        ahead = sum(seconds for other, seconds in self._work_s.items() if other <= priority)
        return self._busy_s(now) + ahead

    def done(self, batch: list[Item], elapsed: float, now: float) -> None:
        self._started_at = None
        if batch:
            rows = batch[0].rows if len(batch) == 1 else sum(item.rows for item in batch)
            batch[0].latency.observe(rows, elapsed, now)
        if not self._queued:
            self._shares.clear()  # nobody waits: nobody is owed anything
        elif batch:
            self._shares[id(batch[0].latency)] = self._round + elapsed

    @property
    def _is_idle(self) -> bool:
        return self._started_at is None and not self._queued

    def _busy_s(self, now: float) -> float:
        """What the running batch still takes. Overdue, it is expected to take as long again as it has taken."""
        if self._started_at is None:
            return 0.0
        left = self._busy_until - now
        return left if left > 0 else now - self._started_at

    def _share(self, item: Item) -> float:
        """Start tag of the item's engine: one that has had nothing for a while is owed nothing for that."""
        return max(self._shares.get(id(item.latency), 0.0), self._round)

    def _cap(self, item: Item, now: float) -> int:
        """Rows of a batch with this item, at most: a request of the most urgent class that arrives just after its start
        is still in time behind it. Twice the time of one row is always allowed."""
        served = [one for one, at in self._seen_at.items() if self._rows[one] or now - at <= _SERVED_S]
        budget = max(SLA_S[min(served, default=item.priority)] / 2, 2 * item.latency.seconds(1, now))
        return max(1, min(item.max_rows, item.latency.rows_within(budget, now)))

    def _head(self, priority: Priority, now: float, aside: list[tuple[_Queue, list[_Entry]]]) -> list[Item]:
        """The most urgent item of a class, taken out; empty where there is none."""
        queues = self._queues[priority]
        heads = [
            (self._share(queue.peek()), *first, queue)
            for key, queue in list(queues.items())
            if (first := self._first(queues, key, queue))
        ]
        if not heads:
            return []
        queue = min(heads, key=lambda head: head[:3])[3]
        item = queue.peek()
        cap = self._cap(item, now)
        if queue.rows <= cap:
            return [self._take(queue)]
        full_s = item.latency.seconds(cap, now)
        passed_over = queue.pass_over(lambda other: other.deadline < now + full_s)
        if queue.first() is None:
            queue.put_back(passed_over)
        else:
            aside.append((queue, passed_over))
        return [self._take(queue)]

    def _first(self, queues: dict[Hashable, _Queue], key: Hashable, queue: _Queue) -> tuple[float, int] | None:
        first = queue.first()
        if first is None:
            del queues[key]
        return first

    def _fill(self, batch: list[Item], rows: int, priority: Priority, now: float) -> int:
        """Takes what fits beside the head from one class; rows of the batch then."""
        head = batch[0]
        queue = self._queues[priority].get(head.key)
        if queue is None:
            return rows
        passed_over: list[_Entry] = []
        cap = self._cap(head, now)
        while rows < cap and len(passed_over) < _LOOK_PAST and queue.first() is not None:
            item = queue.peek()
            if rows + item.rows <= cap and _is_in_time(batch, rows, item, now):
                batch.append(self._take(queue))
                rows += item.rows
            else:
                passed_over.append(queue.pop_entry())
        queue.put_back(passed_over)
        return rows

    def _take(self, queue: _Queue) -> Item:
        item = queue.pop()
        self._take_out(item)
        return item

    def _queue_of(self, item: Item) -> _Queue:
        return self._queues[item.priority].get(item.key, _Queue())

    def _take_out(self, item: Item, *, expired: bool = False) -> None:
        item.is_gone = True
        if not expired and not math.isinf(item.deadline):
            self._expiry.has_left()
        self._rows[item.priority] -= item.rows
        self._queued -= 1
        self._queue_of(item).rows -= item.rows
        self._work_s[item.priority] -= self._cost_s.pop(item.id)
        if self._rows[item.priority] == 0:
            self._work_s[item.priority] = 0.0  # no rounding is carried on


_Entry = tuple[float, int, Item]


class _Queue:
    """A heap of (due, order, item) from which items may leave at any place; those are dropped in time. `rows`: of the
    items in it, kept by its owner."""

    __slots__ = ("_gone", "_heap", "rows")

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._gone = 0
        self.rows = 0

    def push(self, due: float, order: int, item: Item) -> None:
        heapq.heappush(self._heap, (due, order, item))

    def first(self) -> tuple[float, int] | None:
        self._skip()
        return self._heap[0][:2] if self._heap else None

    def peek(self) -> Item:
        return self._heap[0][2]

    def pop(self) -> Item:
        """The first item; after `first` has said that there is one."""
        return heapq.heappop(self._heap)[2]

    def pop_entry(self) -> _Entry:
        return heapq.heappop(self._heap)

    def pass_over(self, is_passed: Callable[[Item], bool]) -> list[_Entry]:
        """Takes out the first items for as long as they are, `_LOOK_PAST` at most."""
        passed_over: list[_Entry] = []
        while len(passed_over) < _LOOK_PAST and self.first() is not None and is_passed(self.peek()):
            passed_over.append(self.pop_entry())
        return passed_over

    def put_back(self, entries: list[_Entry]) -> None:
        for entry in entries:
            heapq.heappush(self._heap, entry)

    def has_left(self) -> None:
        """An item somewhere in the heap is gone. Once most are, the heap is made anew without them."""
        self._gone += 1
        if self._gone > 16 and self._gone > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].is_gone]
            heapq.heapify(self._heap)
            self._gone = 0

    def _skip(self) -> None:
        while self._heap and self._heap[0][2].is_gone:
            heapq.heappop(self._heap)
            self._gone = max(0, self._gone - 1)


def _is_in_time(batch: list[Item], rows: int, item: Item, now: float) -> bool:
    """May `item` ride along: neither it nor anybody aboard is made late by it."""
    end = now + batch[0].latency.seconds(rows + item.rows, now)
    return end <= item.deadline and all(end <= other.deadline for other in batch)
