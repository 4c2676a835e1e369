from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sync.agent.window import Window
from tests.sync.fakes import FakeClock, FakeInstaller, World, trained, weights

NIGHT = Window.parse("23:30-04:00")


def at(hour: int, minute: int = 0, day: int = 10) -> datetime:
    return datetime(2026, 3, day, hour, minute, tzinfo=UTC)


@pytest.mark.parametrize(
    ("now", "opens"),
    [
        (at(23, 30), None),
        (at(23, 59), None),
        (at(0), None),
        (at(3, 59), None),
        (at(4), at(23, 30)),
        (at(12), at(23, 30)),
        (at(23, 29), at(23, 30)),
    ],
)
def test_a_window_may_reach_over_midnight(now: datetime, opens: datetime | None) -> None:
    assert NIGHT.opens_at(now) == opens


def test_a_window_of_one_day_opens_the_next_day_when_it_has_closed() -> None:
    window = Window.parse("02:00-05:00")
    assert window.opens_at(at(1, 59)) == at(2)
    assert window.opens_at(at(4, 59)) is None
    assert window.opens_at(at(5)) == at(2, day=11)


def test_times_are_utc_whatever_the_zone() -> None:
    assert NIGHT.opens_at(at(3).astimezone(timezone(timedelta(hours=9)))) is None


@given(start=st.integers(0, 1439), length=st.integers(1, 1439), now=st.datetimes(timezones=st.just(UTC)))
def test_it_is_open_for_its_length_and_opens_when_it_says(start: int, length: int, now: datetime) -> None:
    if not datetime.min.year < now.year < datetime.max.year:
        return
    window = Window(start, (start + length) % 1440)
    opens = window.opens_at(now)
    since = (60 * now.hour + now.minute - start) % 1440
    assert (opens is None) == (since < length)
    if opens is not None:
        assert timedelta(0) < opens - now <= timedelta(days=1)
        assert window.opens_at(opens) is None


@pytest.mark.parametrize("text", ["", "2:00-5:00", "24:00-01:00", "02:60-03:00", "02:00", "02:00-02:00", "a-b"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="window"):
        Window.parse(text)


def test_a_node_waits_for_its_window_and_says_so(world: World) -> None:
    world.clock.wall = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
    clock = FakeClock(world.clock.wall)
    installer = FakeInstaller()
    world.publish(weights())
    with world.agent(installer, window=NIGHT, clock=clock, interval_s=7200.0) as agent:
        assert agent.run_once()
        (status,) = agent.status()
        assert (status.state, status.code, installer.serving) == ("WAITING", "WINDOW", {})
        assert "23:30-04:00 UTC" in status.reason
        assert world.source.fetched == []
        clock.advance(hours=11)
        assert agent.run_once()
        (status,) = agent.status()
        assert status.next_try_s == 30 * 60  # when it opens: earlier than the interval would have it
        clock.advance(minutes=30)
        assert agent.run_once()
        assert installer.serving == {"digits": "1"}


def test_something_newer_takes_the_place_of_what_waits(world: World) -> None:
    world.clock.wall = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
    installer = FakeInstaller()
    world.publish(weights())
    with world.agent(installer, window=NIGHT) as agent:
        assert agent.run_once()
        world.publish(trained(weights()))
        assert agent.run_once()
        (status,) = agent.status()
        assert (status.state, status.version) == ("WAITING", "2")
