import pytest

from common.errors import DeadlineExceeded, EngineError, InvalidInput, Overloaded, TargetUnreachable, Unavailable
from common.request import Priority
from common.serving.breaker import LONGEST_PAUSE_S, Breaker, TargetBreakers

DEAD = TargetUnreachable("cloud", "refused")
CLASS = Priority.INTERACTIVE


def fail(breakers: TargetBreakers, times: int, exc: Exception = DEAD, *, had_s: float = 5.0, now: float = 0.0) -> None:
    for _ in range(times):
        breakers.failed("cloud", "m", CLASS, exc, had_s, now)


def test_it_opens_after_five_failures_in_a_row_and_only_for_that_target_and_model() -> None:
    breakers = TargetBreakers()
    fail(breakers, 4)
    assert breakers.allows("cloud", "m", CLASS, 0.0)
    fail(breakers, 1)
    assert not breakers.allows("cloud", "m", CLASS, 0.0)
    assert breakers.allows("cloud", "other", CLASS, 0.0)
    assert breakers.allows("edge", "m", CLASS, 0.0)


def test_a_success_in_between_starts_the_count_anew() -> None:
    breakers = TargetBreakers()
    for _ in range(20):
        fail(breakers, 4)
        breakers.answered("cloud", "m")
    assert breakers.allows("cloud", "m", CLASS, 0.0)


def test_after_the_cooldown_one_probe_goes_through_and_its_end_decides() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.failed(0.0)
    assert not breaker.allows(0.49, CLASS)
    assert breaker.allows(0.5, CLASS)
    assert not breaker.allows(0.6, CLASS)  # the probe is under way
    breaker.failed(0.6)
    assert not breaker.allows(1.5, CLASS)  # twice as long: until 1.6
    assert breaker.allows(1.6, CLASS)
    breaker.succeeded()
    assert breaker.allows(1.6, CLASS)
    assert breaker.allows(1.6, CLASS)


def test_a_probe_whose_caller_left_frees_its_place() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.failed(0.0)
    assert breaker.allows(1.0, CLASS)
    breaker.said_nothing()
    assert breaker.allows(1.0, CLASS)


def test_calls_that_were_under_way_when_it_opened_do_not_lengthen_the_cooldown() -> None:
    breaker = Breaker()
    for _ in range(50):
        breaker.failed(0.0)
    assert breaker.open_until(CLASS) == pytest.approx(0.5)


def test_the_longer_cooldown_stands() -> None:
    breaker = Breaker()
    breaker.rest(10.0, CLASS)
    breaker.rest(2.0, CLASS)
    assert not breaker.allows(9.9, CLASS)
    for _ in range(5):
        breaker.failed(0.0)
    breaker.succeeded()
    assert not breaker.allows(9.9, CLASS)  # the target had asked for it
    assert breaker.allows(10.0, CLASS)


def test_a_pause_that_the_target_asks_for_is_kept() -> None:
    breakers = TargetBreakers()
    fail(breakers, 1, Unavailable("come back later", retry_after_s=3.0))
    assert not breakers.allows("cloud", "m", CLASS, 2.9)
    assert breakers.allows("cloud", "m", CLASS, 3.0)


def test_a_pause_holds_for_the_class_that_was_refused_and_for_those_below() -> None:
    breakers = TargetBreakers()
    breakers.failed("cloud", "m", Priority.BATCH, Unavailable("full", retry_after_s=3.0), 5.0, 0.0)
    allowed = {priority for priority in Priority if breakers.allows("cloud", "m", priority, 2.9)}
    assert allowed == {Priority.REALTIME, Priority.INTERACTIVE}
    breakers.failed("cloud", "m", Priority.REALTIME, Unavailable("full", retry_after_s=1.0), 5.0, 0.0)
    assert not any(breakers.allows("cloud", "m", priority, 0.9) for priority in Priority)
    assert breakers.opens_at("cloud", "m", Priority.INTERACTIVE) == 1.0
    assert breakers.opens_at("cloud", "m", Priority.OFFLINE) == 3.0


@pytest.mark.parametrize("asked_s", [1e9, float("inf")])
def test_no_target_can_ask_to_be_left_alone_for_ever(asked_s: float) -> None:
    breakers = TargetBreakers()
    fail(breakers, 1, Unavailable("come back some day", retry_after_s=asked_s))
    assert not breakers.allows("cloud", "m", CLASS, LONGEST_PAUSE_S - 0.1)
    assert breakers.allows("cloud", "m", CLASS, LONGEST_PAUSE_S)


def test_a_pause_that_is_asked_for_during_the_probe_is_kept_and_the_next_probe_comes_after_it() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.failed(0.0)
    assert breaker.allows(0.5, CLASS)  # the probe
    breaker.rest(3.0, CLASS)
    breaker.said_nothing()
    assert not breaker.allows(2.9, CLASS)
    assert breaker.allows(3.0, CLASS)
    assert not breaker.allows(3.0, CLASS)  # one at a time


@pytest.mark.parametrize("exc", [InvalidInput("x", "odd"), Overloaded("device", queued=1, limit=1)])
def test_the_callers_own_fault_and_a_full_queue_never_open_it(exc: Exception) -> None:
    breakers = TargetBreakers()
    fail(breakers, 100, exc)
    assert breakers.allows("cloud", "m", CLASS, 0.0)


def test_a_tiny_deadline_says_nothing_and_a_fair_one_does() -> None:
    breakers = TargetBreakers()
    late = DeadlineExceeded("m", "waiting")
    fail(breakers, 100, late, had_s=0.001)
    assert breakers.allows("cloud", "m", CLASS, 0.0)
    fail(breakers, 5, late, had_s=1.0)  # the same test sees that it does open
    assert not breakers.allows("cloud", "m", CLASS, 0.0)


def test_the_retry_budget_runs_out_at_half_and_fills_by_a_tenth() -> None:
    breakers = TargetBreakers()
    broken = EngineError("m", "odd")
    fail(breakers, 4, broken)
    assert breakers.may_retry(broken)
    fail(breakers, 1, broken)
    assert not breakers.may_retry(broken)
    assert breakers.may_retry(Overloaded("device", queued=1, limit=1))  # nothing had been tried
    breakers.answered("edge", "m")
    assert breakers.may_retry(broken)


def test_models_that_strangers_make_up_take_no_memory() -> None:
    breakers = TargetBreakers()
    for number in range(5000):
        breakers.failed("cloud", f"m{number}", CLASS, DEAD, 5.0, 0.0)
    assert len(breakers._breakers) <= TargetBreakers.MAX
