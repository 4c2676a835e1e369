"""A device in virtual time: the scheduler that serves, with the clock and the engine replaced by arithmetic.

An hour of traffic takes seconds, each run is repeatable, and what a rule gives up can be told from what a machine's
noise takes. Nothing here knows a scheduler's inside: `run` drives any `Scheduler`, as `Device` does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.request import SLA_S, Priority
from common.serving.latency import LatencyModel
from common.serving.scheduler import Item, Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request. Times in seconds from the start."""

    at: float
    deadline: float
    priority: Priority = Priority.INTERACTIVE
    rows: int = 1
    model: str = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A batch of n rows takes `base_s + per_row_s * n`."""

    base_s: float
    per_row_s: float
    max_rows: int

    def seconds(self, rows: int) -> float:
        return self.base_s + self.per_row_s * rows

    @property
    def capacity(self) -> float:
        """Rows a second in full batches."""
        return self.max_rows / self.seconds(self.max_rows)


@dataclass(slots=True)
class Tally:
    """What became of the requests of one class."""

    offered: int = 0
    on_time: int = 0
    late: int = 0  # answered, after the deadline
    dropped: int = 0  # refused or expelled
    latencies_s: list[float] = field(default_factory=list)  # of the answered

    @property
    def over(self) -> float:
        """Share of the offered that was not answered by its deadline."""
        return 1.0 - self.on_time / self.offered if self.offered else 0.0

    def quantile_s(self, share: float) -> float:
        """Latency that `share` of the answered stay within; nan where nothing was answered."""
        ordered = sorted(self.latencies_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else math.nan


@dataclass(slots=True)
class Outcome:
    by_class: dict[Priority, Tally] = field(default_factory=lambda: {one: Tally() for one in Priority})
    by_model: dict[str, Tally] = field(default_factory=dict)
    batches: int = 0
    busy_s: float = 0.0
    ended_at: float = 0.0

    @property
    def total(self) -> Tally:
        whole = Tally()
        for one in self.by_class.values():
            whole.offered += one.offered
            whole.on_time += one.on_time
            whole.late += one.late
            whole.dropped += one.dropped
            whole.latencies_s += one.latencies_s
        return whole

    def goodput(self, seconds: float) -> float:
        """Requests a second that were answered by their deadline."""
        return self.total.on_time / seconds


def poisson(
    rate: float, seconds: float, rng: random.Random, shares: Mapping[Priority, float], *, model: str = "model"
) -> list[Arrival]:
    """Open-loop arrivals of `rate` a second, each of a class drawn by `shares`, due by that class's latency target."""
    classes, weights = list(shares), list(shares.values())
    arrivals: list[Arrival] = []
    at = rng.expovariate(rate)
    while at < seconds:
        [priority] = rng.choices(classes, weights)
        arrivals.append(Arrival(at=at, deadline=at + SLA_S[priority], priority=priority, model=model))
        at += rng.expovariate(rate)
    return arrivals


def run(
    scheduler: Scheduler,
    arrivals: Iterable[Arrival],
    curves: Curve | Mapping[str, Curve],
    *,
    takes: Callable[[Curve, int, float], float] = lambda curve, rows, now: curve.seconds(rows),
    lost_s: float = 0.0,
) -> Outcome:
    """Serves `arrivals` to the end, one batch at a time.

    `curves`: of each model; what the scheduler is told to expect. `takes`: what a batch that starts at a time really
    takes, where that differs. `lost_s`: between two batches, when the device does nothing (the way through a thread).
    """
    of = curves if isinstance(curves, Mapping) else {"model": curves}
    world = _World(scheduler, of, takes, lost_s)
    for arrival in sorted(arrivals, key=lambda one: one.at):
        world.run_until(arrival.at)
        world.arrive(arrival)
    world.run_until(math.inf)
    return world.outcome


class _Queued(Item, kw_only=True, eq=False):
    arrival: Arrival


class _World:
    def __init__(
        self,
        scheduler: Scheduler,
        curves: Mapping[str, Curve],
        takes: Callable[[Curve, int, float], float],
        lost_s: float,
    ) -> None:
        self.outcome = Outcome()
        self._scheduler, self._curves, self._takes, self._lost_s = scheduler, curves, takes, lost_s
        self._models = {name: LatencyModel(one.base_s, one.per_row_s) for name, one in curves.items()}
        self._now = 0.0
        self._number = 0
        self._running: Sequence[Item] = ()
        self._started_at = 0.0
        self._ends_at = math.inf

    def arrive(self, arrival: Arrival) -> None:
        self._number += 1
        curve = self._curves[arrival.model]
        item = _Queued(
            id=self._number,
            key=arrival.model,
            rows=arrival.rows,
            priority=arrival.priority,
            deadline=arrival.deadline,
            latency=self._models[arrival.model],
            max_rows=curve.max_rows,
            arrival=arrival,
        )
        for tally in self._tallies(arrival):
            tally.offered += 1
        if not self._scheduler.push(item, self._now):
            self._drop(item)
        self._pump()

    def run_until(self, until: float) -> None:
        while (
            at := min(self._ends_at, math.nextafter(self._scheduler.wake_at(), math.inf))
        ) <= until and at != math.inf:
            self._now = max(self._now, at)
            if self._ends_at <= self._now:
                self._finish()
            self._pump()
        if until != math.inf:
            self._now = until

    def _pump(self) -> None:
        for item in self._scheduler.expire(self._now):
            self._drop(item)
        if self._running or not (batch := self._scheduler.next(self._now)):
            return
        for item in self._scheduler.expire(self._now):
            self._drop(item)
        rows = sum(item.rows for item in batch)
        takes = self._takes(self._curves[_queued(batch[0]).arrival.model], rows, self._now) + self._lost_s
        self._running, self._started_at, self._ends_at = batch, self._now, self._now + takes
        self.outcome.batches += 1
        self.outcome.busy_s += takes

    def _finish(self) -> None:
        batch, self._running, self._ends_at = self._running, (), math.inf
        self._scheduler.done([*batch], self._now - self._started_at, self._now)
        self.outcome.ended_at = self._now
        for item in batch:
            for tally in self._tallies(_queued(item).arrival):
                tally.latencies_s.append(self._now - _queued(item).arrival.at)
                if self._now <= item.deadline:
                    tally.on_time += 1
                else:
                    tally.late += 1

    def _drop(self, item: Item) -> None:
        for tally in self._tallies(_queued(item).arrival):
            tally.dropped += 1

    def _tallies(self, arrival: Arrival) -> tuple[Tally, Tally]:
        return self.outcome.by_class[arrival.priority], self.outcome.by_model.setdefault(arrival.model, Tally())


def _queued(item: Item) -> _Queued:
    assert isinstance(item, _Queued)
    return item
