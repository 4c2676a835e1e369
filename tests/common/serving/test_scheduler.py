import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.request import Priority
from common.serving.latency import LatencyModel
from common.serving.scheduler import ClassScheduler, Item

LATENCY = LatencyModel(0.005, 0.001)  # 5 ms + 1 ms a row


def item(
    number: int = 1,
    *,
    rows: int = 1,
    priority: Priority = Priority.INTERACTIVE,
    deadline: float = math.inf,
    key: str = "a",
    max_rows: int = 8,
) -> Item:
    return Item(id=number, key=key, rows=rows, priority=priority, deadline=deadline, latency=LATENCY, max_rows=max_rows)


def ids(batch: list[Item]) -> list[int]:
    return [one.id for one in batch]


def test_a_lone_item_is_handed_out_at_once() -> None:
    scheduler = ClassScheduler()
    scheduler.push(item(), now=0.0)
    assert ids(scheduler.next(now=0.0)) == [1]


def test_urgent_classes_go_first_and_earlier_deadlines_within_a_class() -> None:
    scheduler = ClassScheduler()
    scheduler.push(item(1, priority=Priority.BATCH), 0.0)
    scheduler.push(item(2, deadline=0.4), 0.0)
    scheduler.push(item(3, deadline=0.3), 0.0)
    scheduler.push(item(4, priority=Priority.REALTIME), 0.0)
    assert ids(scheduler.next(0.0)) == [4, 3, 2, 1]


def test_a_batch_holds_at_most_max_rows_and_counts_rows_not_requests() -> None:
    scheduler = ClassScheduler()
    for number in (1, 2, 3):
        scheduler.push(item(number, rows=3), 0.0)
    assert ids(scheduler.next(0.0)) == [1, 2]
    assert ids(scheduler.next(0.0)) == [3]


def test_an_item_larger_than_what_is_left_lets_a_smaller_one_ride_along() -> None:
    scheduler = ClassScheduler()
    for number, rows in ((1, 5), (2, 5), (3, 3)):
        scheduler.push(item(number, rows=rows), 0.0)
    assert ids(scheduler.next(0.0)) == [1, 3]
    assert ids(scheduler.next(0.0)) == [2]


def test_only_equal_keys_share_a_batch() -> None:
    scheduler = ClassScheduler()
    scheduler.push(item(1, key="a"), 0.0)
    scheduler.push(item(2, key="b"), 0.0)
    scheduler.push(item(3, key="a"), 0.0)
    assert ids(scheduler.next(0.0)) == [1, 3]
    assert ids(scheduler.next(0.0)) == [2]


def test_nobody_rides_along_who_would_make_the_head_late() -> None:
    scheduler = ClassScheduler()
    scheduler.push(item(1, priority=Priority.REALTIME, deadline=0.0075), 0.0)  # alone 6 ms, with another 7, with two 8
    for number in (2, 3, 4):
        scheduler.push(item(number), 0.0)
    assert ids(scheduler.next(0.0)) == [1, 2]


def test_an_item_that_cannot_make_its_deadline_behind_others_is_refused() -> None:
    scheduler = ClassScheduler()
    scheduler.push(item(), now=1.0)
    assert not scheduler.push(item(deadline=1.0059), now=1.0)
    assert scheduler.push(item(deadline=1.0061), now=1.0)
    assert scheduler.rows_ahead(Priority.OFFLINE) == 2


def test_an_idle_device_tries_whatever_is_not_late_yet() -> None:
    scheduler = ClassScheduler()
    assert not scheduler.push(item(1, deadline=1.0), now=1.0)
    assert scheduler.push(item(2, deadline=1.001), now=1.0)  # predicted 6 ms: an estimate is not a reason to idle
    assert scheduler.expire(1.0005) == []
    assert ids(scheduler.next(1.0005)) == [2]


def test_a_class_without_deadlines_is_not_passed_over_for_ever() -> None:
    scheduler = ClassScheduler()
    scheduler.push(item(1, max_rows=1), 0.0)  # no deadline: due with its class's 500 ms
    scheduler.push(item(2, deadline=0.4, max_rows=1), 0.0)
    scheduler.push(item(3, deadline=0.9, max_rows=1), 0.3)
    assert [ids(scheduler.next(0.3)) for _ in range(3)] == [[2], [1], [3]]


def test_only_rows_of_the_same_or_a_more_urgent_class_are_ahead() -> None:
    scheduler = ClassScheduler()
    scheduler.push(item(1, rows=7, priority=Priority.OFFLINE), 0.0)
    scheduler.push(item(2, rows=2), 0.0)
    assert [scheduler.rows_ahead(priority) for priority in Priority] == [0, 2, 2, 9]


def test_items_that_left_are_not_kept_in_memory() -> None:
    scheduler = ClassScheduler()
    scheduler.push(item(0), 0.0)
    scheduler.next(0.0)  # the device is busy from here on
    for number in range(1, 2001):
        one = item(number, deadline=1.0 + number / 1000)
        scheduler.push(one, 0.0)
        if number % 2:
            scheduler.cancel(one)
    scheduler.expire(10.0)
    assert len(scheduler._expiry) < 32
    assert not scheduler._all


def test_an_overdue_batch_makes_the_wait_longer_not_zero() -> None:
    scheduler = ClassScheduler()
    scheduler.push(item(), 0.0)
    scheduler.next(0.0)
    assert scheduler.wait_s(Priority.REALTIME, 5.0) == pytest.approx(5.0)


def test_late_items_expire_once_while_the_device_is_busy() -> None:
    scheduler = ClassScheduler()
    scheduler.push(item(1), 0.0)
    scheduler.next(0.0)
    for number in range(2, 52):
        scheduler.push(item(number, deadline=0.050), 0.0)
    assert scheduler.wake_at() == pytest.approx(0.044)  # 50 ms less the 6 ms that one row takes
    assert scheduler.expire(0.044) == []
    assert len(scheduler.expire(0.0441)) == 50
    assert scheduler.expire(0.05) == []
    assert scheduler.rows_ahead(Priority.OFFLINE) == 0
    assert scheduler.next(1.0) == []
    assert math.isinf(scheduler.wake_at())


def test_cancelled_items_are_never_handed_out() -> None:
    scheduler = ClassScheduler()
    items = [item(number) for number in range(6)]
    for one in items:
        scheduler.push(one, 0.0)
    for one in items[::2]:
        scheduler.cancel(one)
        scheduler.cancel(one)  # a second time does nothing
    assert scheduler.rows_ahead(Priority.OFFLINE) == 3
    assert ids(scheduler.next(0.0)) == [1, 3, 5]


def test_the_wait_grows_with_what_is_queued_ahead_and_not_with_lower_classes() -> None:
    scheduler = ClassScheduler()
    assert scheduler.wait_s(Priority.REALTIME, 0.0) == 0.0
    for number in range(10):
        scheduler.push(item(number, priority=Priority.BATCH, max_rows=1), 0.0)
    assert scheduler.wait_s(Priority.REALTIME, 0.0) == 0.0
    assert scheduler.wait_s(Priority.BATCH, 0.0) == pytest.approx(0.060)  # ten batches of 6 ms
    batch = scheduler.next(0.0)
    assert scheduler.wait_s(Priority.REALTIME, 0.0) == pytest.approx(0.006)
    scheduler.done(batch, 0.006, 0.006)
    assert scheduler.wait_s(Priority.REALTIME, 0.006) == 0.0


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Priority)), st.integers(1, 8), st.sampled_from("ab"), st.booleans()), max_size=40
    )
)
def test_every_item_leaves_exactly_once_within_limits(
    pushes: list[tuple[Priority, int, str, bool]],
) -> None:
    scheduler = ClassScheduler()
    expected = set()
    for number, (priority, rows, key, is_cancelled) in enumerate(pushes):
        one = item(number, rows=rows, priority=priority, key=key)
        scheduler.push(one, 0.0)
        if is_cancelled:
            scheduler.cancel(one)
        else:
            expected.add(number)
    seen: list[int] = []
    while batch := scheduler.next(0.0):
        assert sum(one.rows for one in batch) <= 8
        assert len({one.key for one in batch}) == 1
        seen += ids(batch)
    assert sorted(seen) == sorted(expected)
    assert scheduler.rows_ahead(Priority.OFFLINE) == 0


def test_a_backlog_is_served_in_full_batches_past_what_is_nearly_late() -> None:
    scheduler = ClassScheduler()
    for number in range(10):
        scheduler.push(item(number, deadline=0.008), 0.0)  # in time for a batch of 3 rows: 5 ms + 3 x 1 ms
    for number in range(10, 30):
        scheduler.push(item(number, deadline=1.0), 0.0)
    assert ids(scheduler.next(0.0)) == list(range(10, 18))
    assert {one.id for one in scheduler.expire(0.013)} == set(range(10))


def test_a_backlog_of_less_urgent_classes_does_not_cost_a_nearly_late_urgent_one_its_turn() -> None:
    scheduler = ClassScheduler()
    scheduler.push(item(1, priority=Priority.REALTIME, deadline=0.007), 0.0)
    for number in range(2, 30):
        scheduler.push(item(number, deadline=1.0), 0.0)
    assert ids(scheduler.next(0.0)) == [1, 2]


def test_without_a_backlog_what_is_nearly_late_is_served_first() -> None:
    scheduler = ClassScheduler()
    scheduler.push(item(1, deadline=0.007), 0.0)
    for number in range(2, 9):
        scheduler.push(item(number, deadline=1.0), 0.0)
    assert ids(scheduler.next(0.0)) == [1, 2]


def test_a_backlog_that_has_reached_its_deadlines_ends() -> None:
    """400 calls/s that may wait 10 s, for a device that does 167 rows/s one by one, 615 in full batches. It stalls for
    12 s: what waits then is all nearly late, and served one by one it would stay so for ever."""
    scheduler, clock, number, answered, arrived = ClassScheduler(), 0.0, 0, 0, 0.0
    late: list[float] = []
    while clock < 40.0:
        while arrived <= clock:
            number += 1
            scheduler.push(item(number, deadline=arrived + 10.0), arrived)
            arrived += 1 / 400
        late += [clock for _ in scheduler.expire(clock)]
        batch = scheduler.next(clock) if clock >= 12.0 else []
        if batch:
            took = LATENCY.seconds(sum(one.rows for one in batch), clock)
            answered += sum(clock + took <= one.deadline for one in batch)
            late += [clock for one in batch if clock + took > one.deadline]
            scheduler.done(batch, took, clock + took)
            clock += took
        else:
            clock = max(arrived, clock + 0.001)
    assert max(late) < 14.0
    assert answered > 0.9 * 400 * 28


def slow_item(number: int, latency: LatencyModel, *, priority: Priority = Priority.INTERACTIVE, rows: int = 1) -> Item:
    key = str(id(latency))
    return Item(id=number, key=key, rows=rows, priority=priority, deadline=math.inf, latency=latency, max_rows=32)


@pytest.mark.parametrize(
    ("seen", "rows"),
    [
        (Priority.OFFLINE, 32),  # no latency target: as full as it may be
        (Priority.BATCH, 19),  # 0.125 + 19 x 0.125 = 2.5 s, half of 5 s
        (Priority.INTERACTIVE, 3),  # half of 0.5 s is one row: twice its time, 0.5 s
        (Priority.REALTIME, 3),
    ],
)
def test_a_batch_leaves_half_the_target_of_the_most_urgent_class_seen(seen: Priority, rows: int) -> None:
    scheduler, latency = ClassScheduler(), LatencyModel(0.125, 0.125)
    scheduler.push(slow_item(0, latency, priority=seen), 0.0)
    scheduler.done(scheduler.next(0.0), 0.25, 0.2)  # as predicted
    for number in range(1, 41):
        scheduler.push(slow_item(number, latency, priority=Priority.OFFLINE), 0.2)
    assert len(scheduler.next(0.2)) == rows


def test_a_class_that_has_not_been_seen_for_ten_seconds_no_longer_cuts_batches() -> None:
    scheduler, latency = ClassScheduler(), LatencyModel(0.125, 0.125)
    assert scheduler.start(slow_item(0, latency, priority=Priority.REALTIME), 0.0)
    scheduler.done([], 0.2, 0.2)
    for number in range(1, 80):
        scheduler.push(slow_item(number, latency, priority=Priority.BATCH), 0.2)
    assert len(scheduler.next(9.0)) == 3
    assert len(scheduler.next(11.0)) == 19


def test_a_request_larger_than_the_cap_runs_alone() -> None:
    scheduler, latency = ClassScheduler(), LatencyModel(0.125, 0.125)
    for number in range(3):
        scheduler.push(slow_item(number, latency, rows=8), 0.0)
    assert [len(scheduler.next(0.0)) for _ in range(4)] == [1, 1, 1, 0]


def test_the_backlog_of_a_slow_engine_does_not_starve_a_quick_one() -> None:
    """Two engines on one device, twice as much work as it can do, all of it by the slow one: the quick one, 200 calls/s
    at 1 ms, still gets its fifth of the device, each answer behind one batch of the other at most."""
    scheduler, slow, quick = ClassScheduler(), LatencyModel(0.0, 0.1), LatencyModel(0.001, 0.0)
    clock, number, waits = 0.0, 0, []
    arrivals = {id(slow): (0.05, 0.0), id(quick): (0.005, 0.0)}
    pushed: dict[int, float] = {}
    while clock < 20.0:
        for latency in (slow, quick):
            every, at = arrivals[id(latency)]
            while at <= clock:
                number += 1
                scheduler.push(slow_item(number, latency), at)
                pushed[number] = at
                at += every
            arrivals[id(latency)] = every, at
        batch = scheduler.next(clock)
        took = batch[0].latency.seconds(len(batch), clock) if batch else 0.001
        clock += took
        if batch:
            scheduler.done(batch, took, clock)
            waits += [clock - pushed[one.id] for one in batch if one.latency is quick]
    assert len(waits) > 0.95 * 200 * 20
    assert max(waits) < 0.25 + 0.01


def test_an_engine_that_was_idle_is_owed_nothing_for_it() -> None:
    scheduler, one, other = ClassScheduler(), LatencyModel(0.0, 0.2), LatencyModel(0.0, 0.2)
    for number in range(20):
        scheduler.push(slow_item(number, one), 0.0)
    for turn in range(5):  # one second of `one` alone
        scheduler.done(scheduler.next(0.2 * turn), 0.2, 0.2 * turn + 0.2)
    for number in range(20, 40):
        scheduler.push(slow_item(number, other), 1.0)
    took = []
    for turn in range(6):
        batch = scheduler.next(1.0 + turn / 5)
        took.append(batch[0].latency is one)
        scheduler.done(batch, 0.2, 1.2 + turn / 5)
    assert took.count(True) == 3


def test_a_tenth_of_the_time_is_kept_for_the_least_urgent_class_across_batches() -> None:
    scheduler, taken = ClassScheduler(), 0
    for number in range(1000):
        scheduler.push(item(number, priority=Priority.BATCH if number % 2 else Priority.REALTIME), 0.0)
    for turn in range(50):
        batch = scheduler.next(0.0)
        assert len(batch) == 8
        scheduler.done(batch, 0.013, 0.0)
        taken += sum(one.priority is Priority.BATCH for one in batch)
        assert abs(taken - 0.1 * 8 * (turn + 1)) <= 1
    assert taken == 40


def test_the_least_urgent_class_gets_its_tenth_on_an_engine_of_its_own_too() -> None:
    scheduler, other = ClassScheduler(), LatencyModel(0.005, 0.001)
    for number in range(1000):
        scheduler.push(item(number, priority=Priority.REALTIME), 0.0)
        scheduler.push(slow_item(1000 + number, other, priority=Priority.BATCH), 0.0)
    of_batch, total, clock = 0.0, 0.0, 0.0
    for _ in range(100):
        batch = scheduler.next(clock)
        took = LATENCY.seconds(len(batch), 0.0)
        clock += took
        scheduler.done(batch, took, clock)
        total += took
        if batch[0].priority is Priority.BATCH:
            assert len(batch) == 32  # it waits until the credit pays for a whole one
            of_batch += took
    assert 0.07 < of_batch / total < 0.12


def test_what_the_batch_that_starts_makes_late_is_given_back_at_once() -> None:
    scheduler = ClassScheduler()
    for number in range(8):
        scheduler.push(item(number, priority=Priority.REALTIME), 0.0)
    scheduler.push(item(8, deadline=0.018), 0.0)  # the eight take 13 ms, one 6 ms
    scheduler.push(item(9, deadline=0.020), 0.0)
    assert scheduler.expire(0.0) == []
    assert ids(scheduler.next(0.0)) == list(range(8))
    assert ids(scheduler.expire(0.0)) == [8]
    assert not scheduler.push(item(10, deadline=0.018), 0.001)
    assert scheduler.push(item(11, deadline=0.020), 0.001)


def test_an_overdue_batch_is_no_reason_to_give_up_on_what_waits() -> None:
    scheduler = ClassScheduler()
    scheduler.push(item(0), 0.0)
    scheduler.next(0.0)  # 6 ms, it is said
    scheduler.push(item(1, deadline=0.1), 0.0)
    assert scheduler.expire(0.09) == []
    assert ids(scheduler.expire(0.095)) == [1]


def test_the_cost_of_a_step_hardly_grows_with_the_queue() -> None:
    """Comparisons of deadlines, counted: a heap of 16,384 is 4 levels deeper than one of 1,024."""

    class Counted(float):
        compared = 0

        def __lt__(self, other: object) -> bool:
            Counted.compared += 1
            return float.__lt__(self, other)  # type: ignore[operator]

    def step(queued: int) -> float:
        scheduler = ClassScheduler()
        for number in range(queued):
            scheduler.push(item(number, deadline=Counted(100 + number * 7919 % queued)), 0.0)
        Counted.compared = 0
        for number in range(queued, queued + 80):
            if number % 8 == 0:
                scheduler.done(scheduler.next(0.0), 0.013, 0.0)
                scheduler.expire(0.0)
            scheduler.push(item(number, deadline=Counted(100 + number * 7919 % queued)), 0.0)
        return Counted.compared / 80

    assert step(16_384) < 2 * step(1_024)
