"""What the device does next: a pure object, no I/O, time is an argument (monotonic seconds).

Work-conserving: it never waits while the device is idle, the batching window is the time the device is busy. One batch:

1. Whose turn: the most urgent class that waits. Within it the engines share the device's time evenly (start-time fair
   queueing, Goyal et al., 1996): the backlog of one never starves another. Of the time in which others go before it,
   the least urgent class keeps a tenth as a credit; once that pays for a batch, it is its turn.
2. No more rows than take half the latency target of the most urgent class that is served here: nothing can break in.
3. As many rows as there are that will still be in time when so many have run. A most urgent class without a backlog of
   its own may cut that, so that those of it who are nearly late still make it. Behind a backlog nobody may: else what
   is nearly late would cut every batch to a row or two, and the backlog would never end.
4. Filled class by class, earliest due time first, the credit's rows kept free for the least urgent.
5. What the batch that runs makes late is given back by the next `expire`: early enough to be answered elsewhere.

Counts are rows, not requests; a step costs O(log n) of what is queued.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from common.request import SLA_S, Priority
from common.serving.due_queue import DueQueue
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
        """Removes what can no longer make its deadline: it gets its error now, not when the device is free.

        To be called after `next` too: what the new batch makes late can still be answered elsewhere.
        """
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

    def done(self, batch: list[Item], elapsed: float, now: float, *, is_usual: bool = True) -> None:
        """The batch has ended. `is_usual`: how long it took says something about the next ones."""
        ...


@dataclass(slots=True, eq=False)
class _Group:
    """What may share a batch. Each item is in the queue of its class, and in `by_deadline` where it has one."""

    key: Hashable
    latency: LatencyModel
    rows: int = 0
    by_class: dict[Priority, DueQueue[Item]] = field(default_factory=dict)
    by_deadline: DueQueue[Item] = field(default_factory=DueQueue)


class ClassScheduler:
    RESERVED = 0.1  # of the device's time, for the least urgent class that waits behind others

    def __init__(self) -> None:
        self._order = itertools.count()
        self._groups: dict[Priority, dict[Hashable, _Group]] = {priority: {} for priority in Priority}
        self._all: dict[Hashable, _Group] = {}
        self._expiry: DueQueue[Item] = DueQueue()
        self._rows = dict.fromkeys(Priority, 0)
        self._queued = 0  # items
        self._work_s = dict.fromkeys(Priority, 0.0)  # predicted seconds of what is queued
        self._cost_s: dict[int, float] = {}  # what each queued item added to that
        self._started_at: float | None = None  # of the batch that runs
        self._busy_until = 0.0
        self._seen_at = dict.fromkeys(Priority, -math.inf)  # last request of each class
        self._round = 0.0  # start tag of the last batch: seconds of device time, of an engine that always had its share
        self._shares: dict[int, float] = {}  # by engine: what it has had, counted from the rounds it took part in
        self._credit_s = 0.0  # of the least urgent class

    def push(self, item: Item, now: float) -> bool:
        takes = item.latency.bound(item.rows, now)
        if item.deadline < now + self._still_s(now) + takes and not (self._is_idle and item.deadline > now):
            return False
        order = next(self._order)
        group = self._all.get(item.key)
        if group is None:
            group = self._all[item.key] = _Group(item.key, item.latency)
        queue = group.by_class.get(item.priority)
        if queue is None:
            queue = group.by_class[item.priority] = DueQueue()
            self._groups[item.priority][item.key] = group
        queue.push(min(item.deadline, now + min(SLA_S[item.priority], _PATIENCE_S)), order, item)
        queue.rows += item.rows
        group.rows += item.rows
        if item.deadline != math.inf:
            group.by_deadline.push(item.deadline, order, item)
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

    def expire(self, now: float) -> list[Item]:
        late: list[Item] = []
        free_at = now + self._still_s(now)
        while (first := self._expiry.first()) is not None and first[0] < free_at:
            self._expiry.pop()
            self._take_out(first[2], expires=False)
            late.append(first[2])
        return late

    def wake_at(self) -> float:
        first = self._expiry.first()
        return first[0] if first is not None else math.inf

    def next(self, now: float) -> list[Item]:
        if not self._queued:
            return []
        waiting = [priority for priority, rows in self._rows.items() if rows]  # most urgent first
        group, is_owed = self._turn(waiting, now)
        urgent = next(priority for priority in waiting if priority in group.by_class)
        rows = self._rows_in_time(group, urgent, now)
        takes = group.latency.bound(rows, now)
        batch = _Filling(room=rows, ends=now + takes, now=now)
        least = waiting[-1]
        if least != waiting[0]:
            self._credit_s += self.RESERVED * takes
        if least != urgent and least in group.by_class:
            of_least = group.by_class[least].rows
            batch.kept = min(of_least, rows if is_owed else int(self._credit_s / takes * rows))
        for priority in waiting:
            if (queue := group.by_class.get(priority)) is not None:
                self._fill(batch, queue, rows if priority == least else rows - batch.kept)
        if not batch.items:  # all of them nearly late, on an idle device: an estimate is not a reason to give up
            self._try(batch)
        batch.put_back()
        if batch.items:
            of_least = sum(item.rows for item in batch.items if item.priority == least)
            spent = group.latency.seconds(batch.rows, now) * of_least / batch.rows
            self._credit_s = max(0.0, self._credit_s - spent) if least != waiting[0] else 0.0
            self._round = self._share(batch.items[0])
            self._started_at = now
            self._busy_until = now + group.latency.seconds(batch.rows, now)
        return batch.items

    def rows_ahead(self, priority: Priority) -> int:
        if not self._queued:
            return 0
        return sum(rows for other, rows in self._rows.items() if other <= priority)

    def wait_s(self, priority: Priority, now: float) -> float:
        if not self._queued:
            return self._busy_s(now)
        ahead = sum(seconds for other, seconds in self._work_s.items() if other <= priority)
        return self._busy_s(now) + ahead

    def done(self, batch: list[Item], elapsed: float, now: float, *, is_usual: bool = True) -> None:
        self._started_at = None
        if batch and is_usual:
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

    def _still_s(self, now: float) -> float:
        """What the running batch is predicted to take from now on: nothing new starts before. Nothing, once overdue."""
        return max(0.0, self._busy_until - now) if self._started_at is not None else 0.0

    def _share(self, item: Item) -> float:
        """Start tag of the item's engine: one that has had nothing for a while is owed nothing for that."""
        return max(self._shares.get(id(item.latency), 0.0), self._round)

    def _cap(self, item: Item, now: float) -> int:
        """Rows of a batch with this item, at most: a request of the most urgent class that arrives just after its start
        is still in time behind it. Twice the time of one row is always allowed."""
        served = [one for one, at in self._seen_at.items() if self._rows[one] or now - at <= _SERVED_S]
        budget = max(SLA_S[min(served, default=item.priority)] / 2, 2 * item.latency.bound(1, now))
        return max(1, min(item.max_rows, item.latency.rows_within(budget, now)))

    def _turn(self, waiting: list[Priority], now: float) -> tuple[_Group, bool]:
        """Whose batch is next, and whether it is so because the least urgent class is owed it."""
        group = self._by_share(waiting[0])
        least = waiting[-1]
        if least not in group.by_class:
            owed = self._by_share(least)
            first = _first(owed.by_class[least])
            if self._credit_s >= owed.latency.seconds(
                max(first.rows, min(owed.by_class[least].rows, self._cap(first, now))), now
            ):
                return owed, True
        return group, False

    def _by_share(self, priority: Priority) -> _Group:
        """The group of the class whose engine has had the least; among equals the one with the most urgent item."""
        groups = self._groups[priority]
        if len(groups) == 1:
            return next(iter(groups.values()))
        heads = []
        for group in groups.values():
            entry = group.by_class[priority].first()
            assert entry is not None  # queues without items are deleted
            heads.append((self._share(entry[2]), *entry[:2], group))
        return min(heads, key=lambda head: head[:3])[3]

    def _rows_in_time(self, group: _Group, urgent: Priority, now: float) -> int:
        """The most rows, so that at least as many are still in time when a batch of so many ends; at least one."""
        latency = group.latency
        cap = self._cap(_first(group.by_class[urgent]), now)
        rows = min(cap, group.rows)
        ends = now + latency.bound(rows, now)
        nearly_late = group.by_deadline.pop_while(lambda item: item.deadline < ends)
        if not nearly_late:
            return rows
        group.by_deadline.put_back(nearly_late)
        if group.by_class[urgent].rows <= cap:
            for deadline, _, item in nearly_late:
                if item.priority == urgent and deadline >= now + latency.bound(item.rows, now):
                    rows = min(rows, max(item.rows, latency.rows_within(deadline - now, now)))
                    break
        in_time = group.rows - sum(entry[2].rows for entry in nearly_late)
        while rows > 1 and in_time < rows:
            while nearly_late and nearly_late[-1][0] >= now + latency.bound(rows, now):
                in_time += nearly_late.pop()[2].rows
            if in_time < rows:
                rows -= 1
        return rows

    def _fill(self, batch: _Filling, queue: DueQueue[Item], room: int) -> None:
        """Takes what is in time and fits, most urgent first."""
        passed_over: list[tuple[float, int, Item]] = []
        too_large = 0
        while batch.rows < room and too_large < _LOOK_PAST and (entry := queue.first()) is not None:
            queue.pop()
            item = entry[2]
            if item.deadline < batch.ends:
                passed_over.append(entry)
            elif batch.rows + item.rows <= room or (
                not batch.items and item.deadline >= batch.now + item.latency.bound(item.rows, batch.now)
            ):
                self._take_out(item, queued=False)
                batch.items.append(item)
                batch.rows += item.rows
            else:
                passed_over.append(entry)
                too_large += 1
        if passed_over:
            batch.aside.append((queue, passed_over))

    def _try(self, batch: _Filling) -> None:
        for _, passed_over in batch.aside:
            for _, _, item in passed_over:
                if item.deadline > batch.now:
                    self._take_out(item, queued=False)
                    batch.items.append(item)
                    batch.rows = item.rows
                    return

    def _take_out(self, item: Item, *, queued: bool = True, expires: bool = True) -> None:
        """Forgets an item. `queued`, `expires`: it still lies in the queue of its class, in that of deadlines."""
        item.is_gone = True
        group = self._all[item.key]
        queue = group.by_class[item.priority]
        queue.rows -= item.rows
        group.rows -= item.rows
        if queue.rows == 0:
            del group.by_class[item.priority], self._groups[item.priority][item.key]
            if group.rows == 0:
                del self._all[item.key]
        elif queued:
            queue.has_left()
        if item.deadline != math.inf:
            group.by_deadline.has_left()
            if expires:
                self._expiry.has_left()
        self._rows[item.priority] -= item.rows
        self._queued -= 1
        self._work_s[item.priority] -= self._cost_s.pop(item.id)
        if self._rows[item.priority] == 0:
            self._work_s[item.priority] = 0.0  # no rounding is carried on


@dataclass(slots=True, eq=False)
class _Filling:
    """A batch in the making."""

    room: int
    ends: float  # when it is predicted to, filled
    now: float
    kept: int = 0  # rows, for the least urgent class
    rows: int = 0
    items: list[Item] = field(default_factory=list)
    aside: list[tuple[DueQueue[Item], list[tuple[float, int, Item]]]] = field(default_factory=list)

    def put_back(self) -> None:
        for queue, entries in self.aside:
            queue.put_back([entry for entry in entries if not entry[2].is_gone])


def _first(queue: DueQueue[Item]) -> Item:
    entry = queue.first()
    assert entry is not None  # queues without items are deleted
    return entry[2]
