"""What the device does next: a pure object, no I/O, time is an argument (monotonic seconds).

Work-conserving: it never waits while the device is idle, the batching window is the time the device is busy. Strict
class order, earliest deadline first within a class. What can no longer be answered in time is given back at once, never
run. Counts are rows, not requests.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

from common.request import Priority
from common.serving.latency import LatencyModel


@dataclass(slots=True, kw_only=True, eq=False)
class Item:
    """One queued request. Only items with an equal `key` (engine, dtypes, row shapes) share a batch."""

    id: int
    key: Hashable
    rows: int
    priority: Priority
    deadline: float
    latency: LatencyModel  # of the engine that the request is pinned to
    max_rows: int
    is_gone: bool = field(default=False)  # left the queue: taken, cancelled or expired


class Scheduler(Protocol):
    queued_rows: int

    def push(self, item: Item, now: float) -> bool:
        """Queues an item; False where it cannot be answered by its deadline however soon it runs."""
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

    def wait_s(self, priority: Priority, now: float) -> float:
        """Seconds until the device would start on a new item of this class."""
        ...

    def done(self, batch: list[Item], elapsed: float, now: float) -> None: ...


class ClassScheduler:
    def __init__(self) -> None:
        self.queued_rows = 0
        self._order = itertools.count()
        self._queues: dict[Priority, list[tuple[float, int, Item]]] = {priority: [] for priority in Priority}
        self._expiry: list[tuple[float, int, Item]] = []
        self._work_s = dict.fromkeys(Priority, 0.0)  # predicted seconds of what is queued, by class
        self._busy_until = 0.0

    def push(self, item: Item, now: float) -> bool:
        if item.deadline < now + item.latency.seconds(item.rows):
            return False
        order = next(self._order)
        heapq.heappush(self._queues[item.priority], (item.deadline, order, item))
        if not math.isinf(item.deadline):
            heapq.heappush(self._expiry, (item.deadline - item.latency.seconds(item.rows), order, item))
        self.queued_rows += item.rows
        self._work_s[item.priority] += item.latency.per_row_s * item.rows
        return True

    def cancel(self, item: Item) -> None:
        if not item.is_gone:
            self._take_out(item)

    def expire(self, now: float) -> list[Item]:
        late: list[Item] = []
        while self._expiry and (self._expiry[0][2].is_gone or self._expiry[0][0] < now):
            item = heapq.heappop(self._expiry)[2]
            if not item.is_gone:
                self._take_out(item)
                late.append(item)
        return late

    def wake_at(self) -> float:
        while self._expiry and self._expiry[0][2].is_gone:
            heapq.heappop(self._expiry)
        return self._expiry[0][0] if self._expiry else math.inf

    def next(self, now: float) -> list[Item]:
        batch: list[Item] = []
        rows = 0
        for queue in self._queues.values():  # Priority's order: most urgent first
            passed_over: list[tuple[float, int, Item]] = []
            while queue:
                entry = heapq.heappop(queue)
                item = entry[2]
                if item.is_gone:
                    continue
                if batch and not _fits(batch, rows, item, now):
                    passed_over.append(entry)
                    continue
                self._take_out(item)
                batch.append(item)
                rows += item.rows
                if rows >= item.max_rows:
                    break
            for entry in passed_over:
                heapq.heappush(queue, entry)
            if batch and rows >= batch[0].max_rows:
                break
        if batch:
            self._busy_until = now + batch[0].latency.seconds(rows)
        return batch

    def wait_s(self, priority: Priority, now: float) -> float:
        ahead = sum(seconds for other, seconds in self._work_s.items() if other <= priority)
        return max(0.0, self._busy_until - now) + ahead

    def done(self, batch: list[Item], elapsed: float, now: float) -> None:
        self._busy_until = now
        if batch:
            batch[0].latency.observe(sum(item.rows for item in batch), elapsed)

    def _take_out(self, item: Item) -> None:
        item.is_gone = True
        self.queued_rows -= item.rows
        left = self._work_s[item.priority] - item.latency.per_row_s * item.rows
        self._work_s[item.priority] = max(0.0, left) if self.queued_rows else 0.0


def _fits(batch: list[Item], rows: int, item: Item, now: float) -> bool:
    """May `item` ride along: same kind, within the batch limit, and nobody aboard is made late by it."""
    head = batch[0]
    if item.key != head.key or rows + item.rows > head.max_rows:
        return False
    end = now + head.latency.seconds(rows + item.rows)
    return end <= item.deadline and all(end <= other.deadline for other in batch)
