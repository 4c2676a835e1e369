"""Clocks that are wrong, and what signed metadata proves about the time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tuf.api.metadata import Metadata, Timestamp

from common.errors import MetadataExpired
from sync.store import TIMESTAMP
from sync.trust.time import raise_time, read_signed_at, read_time, write_signed_at
from tests.sync.trust.places import Place, served

TIMES = st.datetimes(datetime(1970, 1, 1), datetime(2099, 12, 31), timezones=st.just(UTC))
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FAR = datetime(2099, 1, 1, tzinfo=UTC)


@settings(max_examples=40)
@given(proven=st.lists(st.none() | TIMES), clock=TIMES)
def test_the_floor_never_sinks_and_the_time_to_go_by_is_never_below_it(
    proven: list[datetime | None], clock: datetime
) -> None:
    floor: datetime | None = None
    for one in proven:
        before, floor = floor, raise_time(floor, one)
        assert before is None or (floor is not None and floor >= before)
        assert one is None or (floor is not None and floor >= one)
    reading = read_time(clock, floor)
    assert reading.now == max([clock, *(one for one in proven if one is not None)])


@pytest.mark.parametrize(
    ("behind", "verdict"),
    [(-timedelta(days=9), "trusted"), (timedelta(hours=3), "trusted"), (timedelta(days=2), "behind")],
)
def test_a_clock_is_behind_once_it_is_more_than_a_day_before_what_is_proven(behind: timedelta, verdict: str) -> None:
    floor = datetime(2026, 5, 1, tzinfo=UTC)
    assert read_time(floor - behind, floor).verdict == verdict
    assert read_time(EPOCH, None).verdict == "trusted"  # nothing is known yet


@pytest.mark.parametrize("text", [None, 5, "", "yesterday", "2026-05-01", "2027-05-01T00:00:00Z"])
def test_a_signing_time_that_cannot_be_proves_nothing(text: object) -> None:
    signed = Timestamp(expires=datetime(2026, 6, 1, tzinfo=UTC))
    write_signed_at(signed, datetime(2026, 5, 1, tzinfo=UTC))
    assert read_signed_at(signed) == datetime(2026, 5, 1, tzinfo=UTC)
    signed.unrecognized_fields["signed_at"] = text
    assert read_signed_at(signed) is None


def test_the_signing_time_is_under_the_signature(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.publish()
    assert place.node().refresh().signed_at() == place.clock.now().replace(microsecond=0)
    data = place.store.read(TIMESTAMP) or b""
    metadata = Metadata.from_bytes(data)
    assert metadata.signed.unrecognized_fields["signed_at"].encode() in metadata.signed_bytes


def test_a_board_that_boots_in_1970_takes_what_holds_and_not_what_has_ended(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.publish()
    right = place.clock.now()
    floor = place.node().refresh().signed_at()
    place.clock.wall = EPOCH
    view = place.node().refresh(floor)
    assert served(view) == "1"
    assert (view.time.verdict, view.time.now) == ("behind", floor)
    place.clock.wall = right + timedelta(days=4)
    place.repository.renew()
    later = place.node("another").refresh(floor).signed_at()  # heard of in some other way, on that day
    place.store.replace(TIMESTAMP, (tmp_path / "node/metadata/timestamp.json").read_bytes())
    place.clock.wall = EPOCH
    assert served(place.node().refresh(floor)) == "1"
    with pytest.raises(MetadataExpired, match=r"timestamp.* clock reads 1970-01-01 00:00, the newest signed time is"):
        place.node().refresh(later)


def test_a_new_board_knows_that_it_is_not_before_its_root_was_signed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.publish()
    signed_at, place.clock.wall = place.clock.wall.replace(microsecond=0), EPOCH
    view = place.node().refresh()
    assert (served(view), view.time.verdict, view.time.now) == ("1", "behind", signed_at)


def test_a_clock_in_2099_is_told_to_be_wrong_and_nothing_is_lost(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.publish()
    right = place.clock.now()
    node = place.node()
    floor = node.refresh().signed_at()
    assert floor is not None
    before = (tmp_path / "node/metadata/timestamp.json").read_bytes()
    for wrong in (FAR, right + timedelta(days=20)):  # the root has ended, too, or only the online roles
        place.clock.wall = wrong
        for known in (floor, None):
            told = rf"clock reads {wrong:%Y-%m-%d %H:%M}, the newest signed time is {floor:%Y-%m-%d %H:%M} \(if the"
            with pytest.raises(MetadataExpired, match=told):
                node.refresh(known)
    assert (tmp_path / "node/metadata/timestamp.json").read_bytes() == before
    place.clock.wall = right
    place.publish("digits", 2)
    view = node.refresh(floor)
    assert served(view) == "2"
    assert view.time.is_trusted


def test_a_publisher_whose_clock_ran_ahead_for_a_while_does_not_lock_nodes_out(tmp_path: Path) -> None:
    """They have seen a signature of next month: what is signed afterwards has to hold then."""
    place = Place(tmp_path)
    right = place.clock.now()
    place.clock.wall = right + timedelta(days=30)
    place.publish()
    node = place.node()
    floor = node.refresh().signed_at()
    place.clock.wall = right
    place.publish("digits", 2)
    assert served(node.refresh(floor)) == "2"


def test_a_store_of_before_says_no_time_and_is_believed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.publish()
    old = Metadata.from_bytes(place.store.read(TIMESTAMP) or b"")
    del old.signed.unrecognized_fields["signed_at"]
    old.sign(place.keys.signer("timestamp"))
    place.store.replace(TIMESTAMP, old.to_bytes())
    view = place.node().refresh()
    assert (served(view), view.signed_at()) == ("1", None)
    place.publish("digits", 2)
    assert place.node().refresh().signed_at() is not None
