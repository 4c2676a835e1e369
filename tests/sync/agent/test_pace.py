from __future__ import annotations

import random

from sync.agent.pace import BURST_BYTES, MAX_PIECE_BYTES, MIN_PIECE_BYTES, START_PIECE_BYTES, Bucket, Floor, Grain


def test_over_any_time_no_more_comes_than_the_rate_and_one_burst() -> None:
    rng = random.Random(0)
    for rate in (20_000.0, 3e6):
        bucket, now, came = Bucket(rate), 100.0, 0
        for _ in range(2000):
            assert came <= rate * (now - 100.0) + BURST_BYTES + 1
            count = rng.choice((10, 2000, MAX_PIECE_BYTES))
            now += rng.choice((0.0, 0.0, 0.01))
            now += bucket.take(count, now)
            came += count
        assert came > 0.9 * rate * (now - 100.0) or rate > 1e6


def test_a_pause_is_not_saved_up() -> None:
    bucket = Bucket(1e6)
    bucket.take(BURST_BYTES, 0.0)
    assert bucket.take(BURST_BYTES, 3600.0) == 0
    assert bucket.take(1_000_000, 3600.0) == 1.0


def test_a_window_under_the_floor_is_slow_and_an_earlier_good_one_does_not_help() -> None:
    floor = Floor(100.0, 10.0)
    assert floor.slow(9.9, 0) is None
    assert floor.slow(10.0, 1000) is None
    assert floor.slow(19.9, 1000) is None
    assert floor.slow(20.0, 1999) == (10.0, 999)
    assert floor.slow(20.0, 2000) is None


def test_messages_get_small_where_connections_break_and_large_again_where_they_hold() -> None:
    grain = Grain()
    assert (grain.piece_bytes, grain.is_coarse) == (START_PIECE_BYTES, True)
    grain.came(1_280_000)
    grain.broke()
    assert grain.piece_bytes <= 1_280_000 * 0.02 / 2  # half of one is lost at each break, on average
    for _ in range(5):
        grain.broke()  # before a byte came: nothing new
    assert MIN_PIECE_BYTES < grain.piece_bytes < START_PIECE_BYTES
    assert not grain.is_coarse
    grain.came(1)
    grain.broke()
    assert grain.piece_bytes == MIN_PIECE_BYTES
    for _ in range(10_000):
        grain.came(MAX_PIECE_BYTES)
    assert (grain.piece_bytes, grain.is_coarse) == (MAX_PIECE_BYTES, True)
    grain.broke()
    assert grain.piece_bytes == START_PIECE_BYTES


def test_under_a_rate_limit_messages_are_small_from_the_start() -> None:
    assert Grain(80_000).piece_bytes <= 10_000
    assert Grain(80_000).is_coarse
    assert Grain(1.0).piece_bytes == MIN_PIECE_BYTES
    assert Grain(1e9).piece_bytes == START_PIECE_BYTES
