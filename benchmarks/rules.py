"""The rules that a device could follow instead of ours: first come, strict classes, earliest deadline.

Small ones for `benchmarks/scheduling.py`: they sort, and know one engine. All drop what can no longer be in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from common.request import Priority
from common.serving.scheduler import Item

Order = Callable[[Item], tuple[float, ...]]


def first_come(item: Item) -> tuple[float, ...]:
    return (item.id,)


def strict(item: Item) -> tuple[float, ...]:
    return (item.priority, item.deadline)


def earliest_deadline(item: Item) -> tuple[float, ...]:
    return (item.deadline,)


class Sorted:
    """Serves by `order`, in batches that grow as long as nobody aboard is made late where `cut` says so."""

    def __init__(self, order: Order, *, cut: bool) -> None:
        self._order, self._cut = order, cut
        self._queue: list[Item] = []
        self._late: list[Item] = []

    def push(self, item: Item, now: float) -> bool:
        self._queue.append(item)
        return True

    def start(self, item: Item, now: float) -> bool:
        return False

    def cancel(self, item: Item) -> None:
        self._queue.remove(item)

    def expire(self, now: float) -> list[Item]:
        late, self._late = self._late, []
        return late

    def wake_at(self) -> float:
        return math.inf

    def next(self, now: float) -> list[Item]:
        waiting: list[Item] = []
        for item in self._queue:
            in_time = item.deadline >= now + item.latency.seconds(item.rows, now)
            (waiting if in_time else self._late).append(item)
        waiting.sort(key=self._order)
        batch: list[Item] = []
        earliest = math.inf
        for item in waiting:
            ends = now + item.latency.seconds(len(batch) + 1, now)
            if len(batch) == item.max_rows or (self._cut and ends > min(earliest, item.deadline)):
                break
            earliest = min(earliest, item.deadline)
            batch.append(item)
        self._queue = waiting[len(batch) :]
        return batch

    def rows_ahead(self, priority: Priority) -> int:
        return len(self._queue)

    def wait_s(self, priority: Priority, now: float) -> float:
        return 0.0

    def done(self, batch: list[Item], elapsed: float, now: float, *, is_usual: bool = True) -> None: ...
