"""`python -m benchmarks scheduling`: the scheduler in virtual time against other rules, and what it costs in real time.

Simulated figures depend on the seeds alone, not on the machine.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.report import Scale, Table, main
from benchmarks.rules import Sorted, earliest_deadline, first_come, strict
from common.request import Priority
from common.serving.latency import LatencyModel
from common.serving.scheduler import ClassScheduler, Item, Scheduler
from common.serving.simulate import Arrival, Curve, Outcome, poisson
from common.serving.simulate import run as simulate

MIX = {Priority.REALTIME: 0.2, Priority.INTERACTIVE: 0.4, Priority.BATCH: 0.4}
CURVES = (
    Curve(base_s=0.005, per_row_s=0.001, max_rows=64),
    Curve(base_s=0.020, per_row_s=0.0005, max_rows=64),
    Curve(base_s=0.001, per_row_s=0.004, max_rows=16),
    Curve(base_s=0.005, per_row_s=0.0005, max_rows=16),
)
RULES: dict[str, Callable[[], Scheduler]] = {
    "ours": ClassScheduler,
    "strict classes": lambda: Sorted(strict, cut=True),
    "first come, early drop": lambda: Sorted(first_come, cut=False),
    "earliest deadline, cut": lambda: Sorted(earliest_deadline, cut=True),
}
ONE_CLASS = Curve(base_s=0.005, per_row_s=0.0005, max_rows=16)
LOST_S = 0.0003  # per batch, of a good live node


def run(scale: Scale) -> Sequence[Table]:
    return [_classes(scale), _one_class(scale), _cost(scale)]


def _classes(scale: Scale) -> Table:
    seconds, seeds = float(scale.pick(5, 1)), range(1, scale.pick(3, 1) + 1)
    table = Table(
        title="Mixed classes at twice the capacity, simulated",
        how=f"Goodput in % of capacity, realtime on time in % (the worst of {len(seeds)} seeds), {seconds:.0f} s each. "
        "20 % realtime (200 ms), 40 % interactive (500 ms), 40 % batch (5 s). Device a + b x rows ms, max rows.",
        columns=("device", *(f"{name}{what}" for name in RULES for what in ("", ", realtime"))),
    )
    for curve in CURVES:
        cells: list[float] = []
        for rule in RULES.values():
            outcomes = [
                simulate(rule(), poisson(2 * curve.capacity, seconds, random.Random(seed), MIX), curve)
                for seed in seeds
            ]
            goodput = statistics.median(one.total.on_time / one.ended_at for one in outcomes)
            cells += [100 * goodput / curve.capacity]
            cells += [100 * min(1 - one.by_class[Priority.REALTIME].over for one in outcomes)]
        table.add(f"{1000 * curve.base_s:g} + {1000 * curve.per_row_s:g} x rows, {curve.max_rows}", *cells)
    return table


def _one_class(scale: Scale) -> Table:
    seconds = float(scale.pick(60, 2))
    table = Table(
        title="One class, 50 ms, device 5 + 0.5 x rows ms, 16 rows, simulated",
        how=f"p50 / p99 in ms and % over 50 ms (medians of 3 seeds, {seconds:.0f} s each; burst: 2 s at 50 %, 2 s at "
        f"200 %, 4 s at 50 %), without overhead and with {1000 * LOST_S:g} ms lost per batch. Last: a device eight "
        "times slower, 400 ms.",
        columns=("load", "p50", "p99", "over %", "p50, lost", "p99, lost", "over %, lost"),
    )
    steady = {f"{share:.0%}": [(share, seconds)] for share in (0.2, 0.5, 0.8, 0.95)}
    for name, profile in (steady | {"burst": [(0.5, 2.0), (2.0, 2.0), (0.5, 4.0)]}).items():
        table.add(name, *_single(ONE_CLASS, profile, 0.05, 0.0), *_single(ONE_CLASS, profile, 0.05, LOST_S))
    slow = Curve(base_s=0.04, per_row_s=0.004, max_rows=16)
    profile = [(0.95, 2 * seconds)]
    table.add("95%, 8 x slower", *_single(slow, profile, 0.4, 0.0), *_single(slow, profile, 0.4, LOST_S))
    return table


def _single(curve: Curve, profile: Sequence[tuple[float, float]], sla_s: float, lost_s: float) -> tuple[float, ...]:
    totals = []
    for seed in (1, 2, 3):
        outcome: Outcome = simulate(ClassScheduler(), _profile(curve, profile, sla_s, seed), curve, lost_s=lost_s)
        totals.append(outcome.total)
    return (
        1000 * statistics.median(one.quantile_s(0.5) for one in totals),
        1000 * statistics.median(one.quantile_s(0.99) for one in totals),
        100 * statistics.median(one.over for one in totals),
    )


def _profile(curve: Curve, profile: Sequence[tuple[float, float]], sla_s: float, seed: int) -> list[Arrival]:
    rng, base = random.Random(seed), 0.0
    arrivals: list[Arrival] = []
    for share, seconds in profile:
        ats = [base + one.at for one in poisson(share * curve.capacity, seconds, rng, {Priority.INTERACTIVE: 1.0})]
        arrivals += [Arrival(at=at, deadline=at + sla_s) for at in ats]
        base += seconds
    return arrivals


def _cost(scale: Scale) -> Table:
    table = Table(
        title="CPU of the scheduler",
        how="Microseconds of CPU per item for push, next, expire and done in batches of 16, four classes, deadlines in "
        "no order, with so many queued all the time (medians of 5 rounds, depths alternating).",
        columns=("queued", "us an item"),
    )
    depths = (1, 64, 1_000, 10_000)
    rounds = [[_cost_at(depth, scale.pick(20_000, 1_000)) for depth in depths] for _ in range(scale.pick(5, 2))]
    for number, depth in enumerate(depths):
        table.add(depth, statistics.median(one[number] for one in rounds))
    return table


def _cost_at(depth: int, items: int) -> float:
    scheduler, latency, ids, classes = ClassScheduler(), LatencyModel(0.005, 0.0005), itertools.count(), list(Priority)
    now, done = 0.0, 0

    def push() -> None:
        number = next(ids)
        deadline = now + 100 + number * 7919 % 1000 / 1000
        priority = classes[number % 4]
        item = Item(id=number, key=0, rows=1, priority=priority, deadline=deadline, latency=latency, max_rows=16)
        scheduler.push(item, now)

    for _ in range(depth):
        push()
    start = time.thread_time()
    while done < items:
        batch = scheduler.next(now)
        scheduler.expire(now)
        now += 0.001
        scheduler.done(batch, 0.001, now)
        done += len(batch)
        for _ in batch:
            push()
    return 1e6 * (time.thread_time() - start) / items


if __name__ == "__main__":
    main(run, __doc__)
