"""Figures from outside: a zero-overhead batcher simulated on its own gave them for the same device and arrivals (open
loop, Poisson, seeds 1-3), and a queue of that device can do no better than its floor."""

import random
import statistics

import pytest

from common.request import Priority
from common.serving.scheduler import ClassScheduler
from common.serving.simulate import Arrival, Curve, Outcome, poisson, run

DEVICE = Curve(base_s=0.005, per_row_s=0.0005, max_rows=16)  # 1,231 rows/s
MIX = {Priority.REALTIME: 0.2, Priority.INTERACTIVE: 0.4, Priority.BATCH: 0.4}


def steady(load: float, seed: int, seconds: float = 6.0) -> Outcome:
    rate, rng = load * DEVICE.capacity, random.Random(seed)
    arrivals = [
        Arrival(at=one.at, deadline=one.at + 0.050) for one in poisson(rate, seconds, rng, {Priority.INTERACTIVE: 1.0})
    ]
    return run(ClassScheduler(), arrivals, DEVICE)


@pytest.mark.parametrize(("load", "p50_ms", "p99_ms"), [(0.2, 8.6, 13.3), (0.5, 11, 18), (0.8, 15, 26)])
def test_below_capacity_it_is_as_quick_as_a_queue_without_overhead(load: float, p50_ms: float, p99_ms: float) -> None:
    totals = [steady(load, seed).total for seed in (1, 2, 3)]
    assert statistics.median(one.quantile_s(0.5) for one in totals) == pytest.approx(p50_ms / 1000, rel=0.06)
    assert statistics.median(one.quantile_s(0.99) for one in totals) == pytest.approx(p99_ms / 1000, rel=0.08)
    assert all(one.over == 0 for one in totals)


def test_at_95_percent_almost_nothing_is_over_its_50_ms() -> None:
    assert statistics.median(steady(0.95, seed).total.over for seed in (1, 2, 3)) < 0.005


@pytest.mark.parametrize(
    "curve",
    [
        Curve(base_s=0.005, per_row_s=0.001, max_rows=64),
        Curve(base_s=0.020, per_row_s=0.0005, max_rows=64),
        Curve(base_s=0.001, per_row_s=0.004, max_rows=16),
        Curve(base_s=0.005, per_row_s=0.0005, max_rows=16),
    ],
    ids=lambda curve: f"{1000 * curve.base_s:g}+{1000 * curve.per_row_s:g}x{curve.max_rows}",
)
def test_at_twice_the_capacity_the_device_does_what_it_can_and_realtime_is_on_time(curve: Curve) -> None:
    seconds = 10.0
    outcome = run(ClassScheduler(), poisson(2 * curve.capacity, seconds, random.Random(1), MIX), curve)
    assert outcome.total.on_time / outcome.ended_at >= 0.97 * curve.capacity
    assert outcome.by_class[Priority.REALTIME].over <= 0.003
    assert outcome.by_class[Priority.BATCH].on_time >= 0.09 * curve.capacity * seconds  # a tenth is kept for it
    assert outcome.total.late == 0  # what is run is in time, what is not was given back before


def test_every_request_is_accounted_for_once() -> None:
    arrivals = poisson(3 * DEVICE.capacity, 2.0, random.Random(7), MIX)
    outcome = run(ClassScheduler(), arrivals, DEVICE)
    total = outcome.total
    assert total.offered == len(arrivals) == total.on_time + total.late + total.dropped
    assert outcome.by_model["model"].offered == len(arrivals)


def test_a_device_slower_than_it_said_is_found_out_and_answers_stay_in_time() -> None:
    arrivals = poisson(0.5 * DEVICE.capacity, 20.0, random.Random(3), MIX)  # half: all that it can do at half the speed
    outcome = run(ClassScheduler(), arrivals, DEVICE, takes=lambda curve, rows, _: 2 * curve.seconds(rows))
    assert outcome.by_class[Priority.REALTIME].over < 0.003
    assert outcome.total.late < 0.001 * len(arrivals)


def test_a_flood_of_one_model_takes_nothing_from_another_in_the_same_class() -> None:
    flood = poisson(4 * DEVICE.capacity, 5.0, random.Random(1), {Priority.INTERACTIVE: 1.0}, model="flood")
    calm = poisson(0.2 * DEVICE.capacity, 5.0, random.Random(2), {Priority.INTERACTIVE: 1.0}, model="calm")
    outcome = run(ClassScheduler(), [*flood, *calm], {"flood": DEVICE, "calm": DEVICE})
    assert outcome.by_model["calm"].over < 0.001
