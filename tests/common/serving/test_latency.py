import random

import pytest

from common.serving.latency import LatencyModel, Line, measure


def test_the_line_is_fitted_through_one_row_and_several() -> None:
    now = 0.0

    def run(rows: int) -> None:
        nonlocal now
        now += 0.005 + 0.001 * rows

    model = measure(run, 8, lambda: now)
    assert model.seconds(1, 0.0) == pytest.approx(0.006)
    assert model.seconds(100, 0.0) == pytest.approx(0.105)


def test_a_busy_machine_during_the_warm_up_is_not_taken_for_the_engine() -> None:
    now, calls = 0.0, 0

    def run(rows: int) -> None:
        nonlocal now, calls
        calls += 1
        now += 0.01 if calls % 3 else 5.0  # every third call is held up

    assert measure(run, 1, lambda: now).seconds(1, 0.0) == pytest.approx(0.01)


def test_one_outlier_moves_the_estimate_by_at_most_a_quarter() -> None:
    model = LatencyModel(0.1, 0.0)
    model.observe(1, 100.0, now=0.0)
    assert model.seconds(1, 0.0) <= 0.1 * 1.25


def test_a_lasting_change_is_followed() -> None:
    model = LatencyModel(0.1, 0.0)
    for step in range(40):
        model.observe(1, 0.4, now=step / 10)
    assert model.seconds(1, 4.0) == pytest.approx(0.4, rel=0.1)


def test_what_nothing_confirms_falls_back_to_the_warm_up() -> None:
    model = LatencyModel(0.1, 0.0)
    for step in range(40):
        model.observe(1, 0.4, now=step / 10)
    high = model.seconds(1, 4.0)
    assert model.seconds(1, 14.0) == pytest.approx(0.1 + (high - 0.1) / 2, rel=0.05)  # one half-life
    assert model.seconds(1, 1000.0) == pytest.approx(0.1)
    assert not model.is_stale(30.0)
    assert model.is_stale(40.0)


def test_a_queue_served_in_full_batches_costs_its_share_of_them() -> None:
    model = LatencyModel(0.005, 0.001)
    assert model.queued(1, 1, 0.0) == pytest.approx(0.006)
    assert model.queued(4, 8, 0.0) == pytest.approx(0.0065)  # half of a batch of 8: (5 + 8) / 2 ms


def served(model: LatencyModel, batches: int, seed: int = 1, noise: float = 0.0) -> list[tuple[float, float, float]]:
    """(measured, expected, bound) of batches of 1 to 64 rows on a device of 5 ms + 1 ms x rows, one after another."""
    rng, now, seen = random.Random(seed), 0.0, []
    for _ in range(batches):
        rows = rng.choice((1, 4, 16, 64))
        took = (0.005 + 0.001 * rows) * (1 + abs(rng.gauss(0, noise)))
        seen.append((took, model.seconds(rows, now), model.bound(rows, now)))
        now += took
        model.observe(rows, took, now)
    return seen


def test_both_parts_of_a_wrong_line_are_learnt_from_batches_of_many_sizes() -> None:
    model = LatencyModel(0.002, 0.0002)
    served(model, 1500)
    assert model.line.base_s == pytest.approx(0.005, rel=0.05)
    assert model.line.per_row_s == pytest.approx(0.001, rel=0.05)


def test_nineteen_of_twenty_batches_stay_within_the_bound() -> None:
    seen = served(LatencyModel(0.005, 0.001), 3000, noise=0.1)[500:]
    assert sum(took > bound for took, _, bound in seen) / len(seen) == pytest.approx(0.05, abs=0.02)
    assert sum(bound / expected for _, expected, bound in seen) / len(seen) < 1.25


def test_batches_of_one_size_only_leave_the_others_expected_within_reason() -> None:
    model = LatencyModel(0.004, 0.002)
    for number in range(20_000):
        model.observe(16, 0.021, 0.021 * number)
    assert model.seconds(16, 420.0) == pytest.approx(0.021, rel=0.01)
    model.observe(1, 0.006, 420.1)  # the first of another size, which it could not know
    assert 0.001 < model.seconds(1, 420.1) < 0.01
    assert model.seconds(16, 420.1) == pytest.approx(0.021, rel=0.3)


def test_a_reset_forgets_what_was_learnt_and_a_line_goes_on_from_there() -> None:
    model = LatencyModel(0.002, 0.0002)
    served(model, 1500, noise=0.1)
    learnt = model.line
    again = LatencyModel(0.1, 0.0)
    again.begin(learnt)
    assert again.seconds(16, 0.0) == pytest.approx(0.021 * 1.08, rel=0.08)
    assert again.bound(16, 0.0) > again.seconds(16, 0.0)
    model.reset()
    assert model.line == Line(base_s=0.002, per_row_s=0.0002)
