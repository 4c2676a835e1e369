"""A moment that is written down and read later: by the same boot's clock, or else by the wall's, asked once."""

from __future__ import annotations

import time

import pytest

from common.clock import Moment, SystemBootClock

WRITTEN = Moment(boot="a", boot_s=100.0, wall_s=5000.0)


@pytest.mark.parametrize(
    ("boot", "boot_s", "wall_s", "age_s"),
    [
        ("a", 130.0, 5030.0, 30.0),
        ("a", 130.0, 1430.0, 30.0),  # set back an hour meanwhile
        ("a", 130.0, 8630.0, 30.0),  # set forward
        ("a", 90.0, 5030.0, -10.0),  # no clock of this machine
        ("b", 20.0, 5040.0, 40.0),
        ("b", 20.0, 10.0, 20.0),  # started with a wrong wall clock
    ],
)
def test_the_age_of_what_was_written(boot: str, boot_s: float, wall_s: float, age_s: float) -> None:
    assert WRITTEN.age_s(Moment(boot=boot, boot_s=boot_s, wall_s=wall_s)) == age_s


def test_a_machine_whose_boots_cannot_be_told_apart_goes_by_the_wall() -> None:
    unknown = Moment(boot="", boot_s=100.0, wall_s=5000.0)
    assert unknown.age_s(Moment(boot="", boot_s=130.0, wall_s=5300.0)) == 300.0


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_step_of_the_wall_clock_is_not_seen(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, real = SystemBootClock(), time.time
    before = clock.moment()
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    after = clock.moment()
    assert abs(before.wall_s - real()) < 5
    assert 0 <= after.wall_s - before.wall_s < 5
    assert after.boot == before.boot != ""
    assert 0 <= before.age_s(after) < 5
