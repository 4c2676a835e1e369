import pytest

from common.serving.latency import LatencyModel, measure


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


def test_one_outlier_moves_the_estimate_by_at_most_a_fifth() -> None:
    model = LatencyModel(0.1, 0.0)
    model.observe(1, 100.0, now=0.0)
    assert model.seconds(1, 0.0) <= 0.1 * 1.2 + 1e-9


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
