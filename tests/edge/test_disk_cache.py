"""Who gets which answer from the node's cache, for how long, and what it does when the disk fails."""

import asyncio
import resource
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from common.bundle import CacheRules
from common.request import Context, Privacy, Request, Stamp
from edge import Node, NodeConfig, StaticModel
from edge.disk_rows import is_damage
from tests.bundles import WEIGHT, forward, write_bundle
from tests.edge.caches import REQUEST, Fixture, answer, read, store

HOUR_S = 3600.0
PRIVATE = structs.replace(REQUEST, context=Context(privacy=Privacy.DEVICE_ONLY))


@pytest.fixture
def fixture(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path / "cache")


async def test_an_answer_survives_a_restart_and_says_that_it_is_cached(fixture: Fixture) -> None:
    async with fixture.cache() as cache:
        assert await read(cache) is None
        await store(cache, REQUEST, answer())
    async with fixture.cache() as cache:
        hit = await read(cache)
    assert hit is not None
    assert hit.stamp == Stamp(target="cache", model="double", version="1", by="node")
    np.testing.assert_array_equal(hit.outputs["y"], answer().outputs["y"])
    assert hit.outputs["labels"].tolist() == [[b"a", b"bc"]]
    assert oct(fixture.folder.stat().st_mode)[-3:] == "700"
    assert fixture.faults == []


async def test_an_answer_without_elements_is_kept_too(fixture: Fixture) -> None:
    nothing = structs.replace(answer(), outputs={"boxes": np.zeros((0, 4), np.float32)})
    async with fixture.cache() as cache:
        await store(cache, REQUEST, nothing)
        hit = await read(cache)
    assert hit is not None
    assert hit.outputs["boxes"].shape == (0, 4)


@pytest.mark.parametrize(
    "other",
    [
        structs.replace(REQUEST, inputs={"x": np.full((1, 2), 1.5, np.float32)}),
        structs.replace(REQUEST, inputs={"x": np.ones((2, 1), np.float32)}),
        structs.replace(REQUEST, inputs={"x": np.ones((1, 2), np.float32).view(np.int32)}),
        structs.replace(REQUEST, inputs={"z": np.ones((1, 2), np.float32)}),
        structs.replace(REQUEST, inputs={**REQUEST.inputs, "z": np.ones((1, 2), np.float32)}),
        structs.replace(REQUEST, outputs=("y",)),
        structs.replace(REQUEST, outputs=("labels", "y")),
        structs.replace(REQUEST, classes=1),
        structs.replace(REQUEST, parameters={"temperature": 1}),
        structs.replace(REQUEST, context=Context(tenant="other")),
        structs.replace(REQUEST, context=Context(pin="2")),
        structs.replace(REQUEST, model="triple"),
    ],
)
async def test_a_request_that_differs_in_any_field_misses(fixture: Fixture, other: Request) -> None:
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer())
        assert await read(cache, other) is None
        assert await read(cache) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [({"outputs": ("y", "labels")}, {"outputs": ("labels", "y")})]
    + [({"parameters": {"p": a}}, {"parameters": {"p": b}}) for a, b in ((1, True), (1, 1.0), (1, "1"), ("a", "A"))],
)
async def test_near_misses_are_misses(fixture: Fixture, one: dict[str, object], other: dict[str, object]) -> None:
    async with fixture.cache() as cache:
        await store(cache, structs.replace(REQUEST, **one), answer())
        assert await read(cache, structs.replace(REQUEST, **other)) is None


async def test_what_only_describes_the_call_does_not_matter(fixture: Fixture) -> None:
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer())
        context = Context(id="other", deadline=time.monotonic() + 60, traceparent="00-1-2-01")
        assert await read(cache, structs.replace(REQUEST, context=context)) is not None


async def test_another_versions_answer_is_never_served(fixture: Fixture) -> None:
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer("1", 2.0))
        fixture.serve("2")
        assert await read(cache) is None
        await store(cache, REQUEST, answer("3", 6.0))  # a newer worker answered: kept under the version that answered
        assert await read(cache) is None
        fixture.serve("3")
        hit = await read(cache)
        assert hit is not None
        assert hit.outputs["y"][0, 0] == 6.0


async def test_a_versions_name_used_again_for_another_model_brings_nothing_of_the_first(
    fixture: Fixture,
) -> None:
    fixture.serve("1", identity="first")
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer("1", 2.0, identity="first"))
        assert await read(cache) is not None
        fixture.serve("1", identity="second")
        assert await read(cache) is None
        await store(cache, REQUEST, answer("1", 4.0, identity="first"))  # of a call that the first engine still had
        assert await read(cache) is None
        await store(cache, REQUEST, answer("1", 6.0))  # a cloud's: its version 1 may be a third model
        assert await read(cache) is None
        pinned = structs.replace(REQUEST, context=Context(pin="1"))
        fixture.serve("2", identity="third")
        hit = await read(cache, pinned)  # only a cloud has version 1 now, and this is what it said
        assert hit is not None
        assert hit.outputs["y"][0, 0] == 6.0


async def test_a_bundle_built_anew_in_its_place_answers_for_itself(tmp_path: Path) -> None:
    ask, folder = {"x": np.ones((1, 2), np.float32)}, tmp_path / "bundle"
    write_bundle(folder)
    config = NodeConfig(state_dir=str(tmp_path / "state"), models=(StaticModel(bundle=str(folder)),))
    async with Node(config) as node:
        first = await node.infer("linear", ask)
        async with asyncio.timeout(5):
            while (await node.dataplane._cache.lookup(Request(model="linear", inputs=ask))).response is None:
                await asyncio.sleep(0.01)
        write_bundle(folder, weight=WEIGHT * 10)
        await node.local.repository.unload("linear")
        await node.local.repository.load("linear")
        second = await node.infer("linear", ask)
    assert (second.stamp.target, second.stamp.version) == ("edge", first.stamp.version)
    np.testing.assert_allclose(second.outputs["logits"], forward(ask["x"], WEIGHT * 10), rtol=1e-5)


async def test_another_models_answer_is_not_kept(fixture: Fixture) -> None:
    degraded = structs.replace(answer(), stamp=Stamp(target="edge", model="smaller", version="1"))
    async with fixture.cache() as cache:
        await store(cache, REQUEST, degraded)
        assert fixture.rows() == 0
        assert await read(cache) is None


async def test_device_only_answers_are_kept_only_where_the_model_allows_it(fixture: Fixture) -> None:
    async with fixture.cache() as cache:
        await store(cache, PRIVATE, answer())
        assert await read(cache, PRIVATE) is None
        assert await read(cache) is None
        fixture.serve("1", CacheRules(keep_device_only=True))
        await store(cache, PRIVATE, answer())
        assert await read(cache, PRIVATE) is not None


async def test_public_models_share_answers_between_tenants_but_never_device_only_ones(fixture: Fixture) -> None:
    fixture.serve("1", CacheRules(is_public=True, keep_device_only=True))
    other = structs.replace(REQUEST, context=Context(tenant="other"))
    async with fixture.cache() as cache:
        await store(cache, PRIVATE, answer())
        assert await read(cache, other) is None
        await store(cache, REQUEST, answer())
        assert await read(cache, other) is not None


async def test_what_was_never_looked_up_is_not_stored(fixture: Fixture) -> None:
    """The caller's arrays may have changed since it called: a digest of them now would be another request's."""
    async with fixture.cache() as cache:
        assert cache.store(REQUEST, answer(), None) is None
        assert await read(cache) is None


async def test_a_call_that_has_no_time_left_is_a_miss_and_no_fault(fixture: Fixture) -> None:
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer())
        late = structs.replace(REQUEST, context=Context(deadline=time.monotonic() - 1))
        assert await read(cache, late) is None
    assert fixture.faults == []


# --- time ---


async def test_an_answer_expires_at_its_ttl_and_a_ttl_of_zero_keeps_nothing(fixture: Fixture) -> None:
    fixture.serve("1", CacheRules(ttl_s=10.0))
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer())
        fixture.clock.advance(9.9)
        assert await read(cache) is not None
        fixture.clock.advance(0.2)
        assert await read(cache) is None
        assert fixture.rows() == 0
        fixture.serve("1", CacheRules(ttl_s=0.0))
        await store(cache, REQUEST, answer())
        fixture.serve("1")
        assert await read(cache) is None


@pytest.mark.parametrize("step_s", [-HOUR_S, HOUR_S])
async def test_a_wall_clock_that_steps_expires_nothing_and_keeps_nothing_alive(
    fixture: Fixture, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture.serve("1", CacheRules(ttl_s=60.0))
    real = time.time
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer())
        fixture.clock.wall_s += step_s
        monkeypatch.setattr("time.time", lambda: real() + step_s)  # for the library's own calls
        assert await read(cache) is not None
        other = structs.replace(REQUEST, classes=2)
        await store(cache, other, answer())
        assert await read(cache, other) is not None
    async with fixture.cache() as cache:  # a restart on the same boot
        assert await read(cache) is not None
        fixture.clock.advance(61.0)
        assert await read(cache) is None


async def test_after_a_reboot_the_wall_clock_counts_but_never_makes_an_answer_younger_than_the_boot(
    fixture: Fixture,
) -> None:
    fixture.serve("1", CacheRules(ttl_s=60.0))
    first, second = REQUEST, structs.replace(REQUEST, classes=2)
    async with fixture.cache() as cache:
        await store(cache, first, answer())
    fixture.clock.reboot(down_s=30.0)
    async with fixture.cache() as cache:
        assert await read(cache, first) is not None
        fixture.clock.advance(30.0)
        assert await read(cache, first) is None
        await store(cache, second, answer())
    fixture.clock.reboot(down_s=-10 * HOUR_S)  # no battery behind its clock
    async with fixture.cache() as cache:
        assert await read(cache, second) is not None
        fixture.clock.advance(60.0)
        assert await read(cache, second) is None


async def test_the_oldest_answers_make_room_also_while_the_wall_clock_runs_an_hour_behind(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [structs.replace(REQUEST, parameters={"i": i}) for i in range(30)]
    real = time.time
    async with fixture.cache(quota_bytes=2 << 20) as cache:
        for request in requests[:15]:
            await store(cache, request, answer(columns=25_000))
        monkeypatch.setattr("time.time", lambda: real() - HOUR_S)
        for request in requests[15:]:
            await store(cache, request, answer(columns=25_000))
        kept = [await read(cache, request) is not None for request in requests]
    assert kept == sorted(kept)  # no younger one went before an older one
    assert 3 <= sum(kept) < 25


@pytest.mark.parametrize("quota_bytes", [1 << 20, 2 << 20, 4 << 20])
async def test_the_quota_holds_for_the_whole_folder_whatever_the_sizes(fixture: Fixture, quota_bytes: int) -> None:
    async with fixture.cache(quota_bytes=quota_bytes) as cache:
        for i in range(400):
            cache.store(REQUEST, answer(), bytes([i % 256, i // 256]))
        for i in range(40):  # up to an eighth of the quota, hundreds of those; four quotas in all
            columns = quota_bytes // 32 if i % 4 else 2_500
            kept = cache.store(REQUEST, answer(columns=columns), b"big %d" % i)
            assert kept is not None
            await kept
            assert sum(file.stat().st_size for file in fixture.folder.iterdir()) <= quota_bytes
        assert fixture.rows() >= 3


# --- what is certainly not on the disk ---


async def test_a_certain_miss_does_not_wait_for_the_disk_and_a_possible_hit_does(fixture: Fixture) -> None:
    async with fixture.cache() as cache:
        for n in range(3):
            await store(cache, structs.replace(REQUEST, classes=n), answer())
    async with fixture.cache() as cache:
        strange, large = structs.replace(REQUEST, classes=9), np.ones((1, 20_000), np.float32)
        async with asyncio.timeout(5):  # until the keys of the database have been read
            while cache._known.is_unread:
                await asyncio.sleep(0.001)
        held = threading.Event()
        cache._thread.submit(held.wait, 10)
        assert (await cache.lookup(strange)).key is not None
        waiting = asyncio.create_task(cache.lookup(structs.replace(REQUEST, classes=2)))
        digests = asyncio.create_task(cache.lookup(structs.replace(REQUEST, inputs={"x": large})))
        kept = cache.store(strange, answer(), (await cache.lookup(strange)).digest)
        written = asyncio.create_task(cache.lookup(strange))  # its write is under way: no longer certain
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in (waiting, digests, written))
        held.set()
        assert kept is not None
        await kept
        assert (await waiting).response is not None
        assert (await written).response is not None
        assert (await digests).response is None
    assert fixture.faults == []


async def test_keys_that_are_gone_are_forgotten_when_enough_have_been_written(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.known_keys.FULL", 50)
    requests = [structs.replace(REQUEST, classes=n) for n in range(60)]
    async with fixture.cache() as cache:
        await store(cache, requests[0], answer())
        fixture.clock.advance(1e9)
        assert await read(cache, requests[0]) is None  # expired: its row is gone
        for request in requests[1:]:
            await store(cache, request, answer())
        async with asyncio.timeout(5):
            while cache._known.older is not None:
                await asyncio.sleep(0.001)
        keys = [str((await cache.lookup(request)).key) for request in requests]
        assert [cache._known.may_have(key) for key in keys] == [False] + [True] * 59
        assert all([await read(cache, request) is not None for request in requests[1:]])


# --- a disk that fails ---


async def test_a_folder_that_cannot_be_used_means_no_cache_not_no_service(fixture: Fixture) -> None:
    fixture.folder.write_bytes(b"a file where the folder should be")
    async with fixture.cache() as cache:
        for _ in range(3):
            await store(cache, REQUEST, answer())
            assert await read(cache) is None
        assert [fault.is_new for fault in fixture.faults] == [True]
        fixture.folder.unlink()
        fixture.clock.advance(61.0)
        await store(cache, REQUEST, answer())
        assert await read(cache) is not None


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_disk_that_takes_no_more_costs_no_call_is_said_once_and_used_again_when_it_does(
    fixture: Fixture,
) -> None:
    requests = [structs.replace(REQUEST, parameters={"i": i}) for i in range(40)]
    async with fixture.cache() as cache:
        await store(cache, requests[0], answer())
        with largest_file(200_000):
            for request in requests[1:]:
                await store(cache, request, answer(columns=10_000))
        assert fixture.faults
        assert len([fault for fault in fixture.faults if fault.is_new]) <= 3  # written, opened again, read
        fixture.clock.advance(61.0)
        await store(cache, REQUEST, answer())
        assert await read(cache) is not None


async def test_a_database_that_another_process_holds_is_left_alone_and_said_once(fixture: Fixture) -> None:
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer())
        with closing(sqlite3.connect(fixture.folder / "cache.db", isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            others = [structs.replace(REQUEST, classes=n) for n in range(1, 4)]
            await store(cache, others[0], answer())
            await store(cache, others[1], answer())  # not tried: the disk has the time for reads
            assert await read(cache) is not None
            assert [fault.is_new for fault in fixture.faults] == [True]
            fixture.clock.advance(1.1)
            await store(cache, others[1], answer())
            assert [fault.is_new for fault in fixture.faults] == [True, False]
        fixture.clock.advance(1.1)
        await store(cache, others[2], answer())
        assert await read(cache, others[2]) is not None


def test_a_full_or_locked_disk_is_no_reason_to_begin_anew() -> None:
    for text in ("database or disk is full", "attempt to write a readonly database", "database is locked"):
        assert not is_damage(sqlite3.OperationalError(text))
    assert is_damage(sqlite3.DatabaseError("database disk image is malformed"))
