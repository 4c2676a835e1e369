import asyncio
import dataclasses
import os
import pickle
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.bundle import CacheRules
from common.request import Context, Privacy, Request, Response, Stamp
from common.serving.repository import Installed, Repository
from common.telemetry.events import CacheFault
from edge.disk_cache import DiskCache
from tests.fakes import FakeEngine, config, loaded

REQUEST = Request(model="double", inputs={"x": np.ones((1, 2), np.float32)})


def answer(version: str = "1", y: float = 2.0) -> Response:
    labels = np.array([[b"a", b"bc"]], dtype=object)
    return Response(
        outputs={"y": np.full((1, 2), y, np.float32), "labels": labels},
        stamp=Stamp(target="edge", model="double", version=version, by="node"),
    )


class Fixture:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[object] = []
        self.repository = Repository(lambda what: loaded(FakeEngine(), what.version), lambda engine: None)
        self.serve("1")

    def serve(self, version: str, rules: CacheRules | None = None) -> None:
        model = dataclasses.replace(config(), cache=rules or CacheRules())
        installed = Installed(model="double", version=version, folder=Path("/"), variant="full", engine="fake")
        self.repository.activate(loaded(FakeEngine(), version, model), installed)

    @asynccontextmanager
    async def cache(self, **options: Any) -> AsyncIterator[DiskCache]:
        async with DiskCache(self.folder, self.repository, by="node", on_event=self.events.append, **options) as cache:
            yield cache

    def tamper(self, statement: str, *values: object) -> None:
        with sqlite3.connect(self.folder / "cache.db") as db:
            assert db.execute(statement, values).rowcount == 1
        db.close()

    def rows(self) -> int:
        with sqlite3.connect(self.folder / "cache.db") as db:
            (count,) = db.execute("SELECT COUNT(*) FROM Cache").fetchone()
        db.close()
        return int(count)


@pytest.fixture
def fixture(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path / "cache")


async def test_an_answer_survives_a_restart_and_says_that_it_is_cached(fixture: Fixture) -> None:
    async with fixture.cache() as cache:
        assert (await cache.lookup(REQUEST)).response is None
        cache.store(REQUEST, answer(), None)
    async with fixture.cache() as cache:
        hit = (await cache.lookup(REQUEST)).response
    assert hit is not None
    assert hit.stamp == Stamp(target="cache", model="double", version="1", by="node")
    np.testing.assert_array_equal(hit.outputs["y"], answer().outputs["y"])
    assert hit.outputs["labels"].tolist() == [[b"a", b"bc"]]
    assert oct(fixture.folder.stat().st_mode)[-3:] == "700"


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(REQUEST, inputs={"x": np.full((1, 2), 1.5, np.float32)}),
        dataclasses.replace(REQUEST, inputs={"x": np.ones((2, 1), np.float32)}),
        dataclasses.replace(REQUEST, inputs={"x": np.ones((1, 2), np.int32).view(np.int32)}),
        dataclasses.replace(REQUEST, inputs={"z": np.ones((1, 2), np.float32)}),
        dataclasses.replace(REQUEST, outputs=("y",)),
        dataclasses.replace(REQUEST, classes=1),
        dataclasses.replace(REQUEST, parameters={"temperature": 1}),
        dataclasses.replace(REQUEST, context=Context(tenant="other")),
        dataclasses.replace(REQUEST, context=Context(pin="2")),
        dataclasses.replace(REQUEST, model="triple"),
    ],
)
async def test_a_request_that_differs_in_any_field_misses(fixture: Fixture, other: Request) -> None:
    async with fixture.cache() as cache:
        cache.store(REQUEST, answer(), None)
        assert (await cache.lookup(other)).response is None
        assert (await cache.lookup(REQUEST)).response is not None


async def test_what_only_describes_the_call_does_not_matter(fixture: Fixture) -> None:
    async with fixture.cache() as cache:
        cache.store(REQUEST, answer(), None)
        again = dataclasses.replace(
            REQUEST, context=Context(id="other", deadline=time.monotonic() + 60, traceparent="00-1-2-01")
        )
        assert (await cache.lookup(again)).response is not None


async def test_another_versions_answer_is_never_served(fixture: Fixture) -> None:
    async with fixture.cache() as cache:
        cache.store(REQUEST, answer("1", 2.0), None)
        fixture.serve("2")
        assert (await cache.lookup(REQUEST)).response is None
        cache.store(REQUEST, answer("3", 6.0), None)  # a newer worker answered: kept under the version that answered
        assert (await cache.lookup(REQUEST)).response is None
        fixture.serve("3")
        hit = (await cache.lookup(REQUEST)).response
        assert hit is not None
        assert hit.outputs["y"][0, 0] == 6.0


async def test_another_models_answer_is_not_kept(fixture: Fixture) -> None:
    degraded = dataclasses.replace(answer(), stamp=Stamp(target="edge", model="smaller", version="1"))
    async with fixture.cache() as cache:
        cache.store(REQUEST, degraded, None)
        assert (await cache.lookup(REQUEST)).response is None


async def test_device_only_answers_are_kept_only_where_the_model_allows_it(fixture: Fixture) -> None:
    private = dataclasses.replace(REQUEST, context=Context(privacy=Privacy.DEVICE_ONLY))
    async with fixture.cache() as cache:
        cache.store(private, answer(), None)
        assert (await cache.lookup(private)).response is None
        assert (await cache.lookup(REQUEST)).response is None
        fixture.serve("1", CacheRules(keep_device_only=True))
        cache.store(private, answer(), None)
        assert (await cache.lookup(private)).response is not None


async def test_public_models_share_answers_between_tenants(fixture: Fixture) -> None:
    fixture.serve("1", CacheRules(is_public=True))
    async with fixture.cache() as cache:
        cache.store(REQUEST, answer(), None)
        assert (await cache.lookup(dataclasses.replace(REQUEST, context=Context(tenant="other")))).response is not None


async def test_answers_expire_and_a_ttl_of_zero_keeps_nothing(fixture: Fixture) -> None:
    fixture.serve("1", CacheRules(ttl_s=0.01))
    async with fixture.cache() as cache:
        cache.store(REQUEST, answer(), None)
        await asyncio.sleep(0.05)
        assert (await cache.lookup(REQUEST)).response is None
        fixture.serve("1", CacheRules(ttl_s=0.0))
        cache.store(REQUEST, answer(), None)
        fixture.serve("1")
        assert (await cache.lookup(REQUEST)).response is None


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE Cache SET value = x'00112233445566778899'",
        "UPDATE Cache SET value = substr(value, 1, length(value) - 1)",
        "UPDATE Cache SET mode = 4, value = ?",  # a pickle
        "UPDATE Cache SET mode = 2, filename = '../../outside', value = NULL",
        "UPDATE Cache SET value = 'text'",
    ],
)
async def test_a_planted_or_damaged_row_is_a_miss_is_removed_and_runs_nothing(
    fixture: Fixture, statement: str, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    marker = tmp_path / "pickle-ran"

    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    async with fixture.cache() as cache:
        cache.store(REQUEST, answer(), None)
    values = [pickle.dumps(Hostile())] if "?" in statement else []
    fixture.tamper(statement, *values)
    async with fixture.cache() as cache:
        assert (await cache.lookup(REQUEST)).response is None
        assert [type(e) for e in fixture.events if isinstance(e, CacheFault)] == [CacheFault]
        assert fixture.rows() == 0
        cache.store(REQUEST, answer(), None)
        assert (await cache.lookup(REQUEST)).response is not None
    assert not marker.exists()
    assert outside.read_bytes() == b"secret"


async def test_a_row_moved_under_another_key_is_not_served(fixture: Fixture) -> None:
    other = dataclasses.replace(REQUEST, classes=2)
    async with fixture.cache() as cache:
        cache.store(REQUEST, answer(), None)
        cache.store(other, answer(y=9.0), None)
    with sqlite3.connect(fixture.folder / "cache.db") as db:
        (first, a), (second, b) = db.execute("SELECT rowid, value FROM Cache ORDER BY rowid").fetchall()
        db.execute("UPDATE Cache SET value = ? WHERE rowid = ?", (b, first))
        db.execute("UPDATE Cache SET value = ? WHERE rowid = ?", (a, second))
    db.close()
    async with fixture.cache() as cache:
        assert (await cache.lookup(REQUEST)).response is None
        assert (await cache.lookup(other)).response is None


async def test_a_folder_that_cannot_be_used_means_no_cache_not_no_service(fixture: Fixture) -> None:
    fixture.folder.write_bytes(b"a file where the folder should be")
    async with fixture.cache() as cache:
        cache.store(REQUEST, answer(), None)
        assert (await cache.lookup(REQUEST)).response is None
    assert any(isinstance(event, CacheFault) for event in fixture.events)


async def test_the_quota_is_kept(fixture: Fixture) -> None:
    big = dataclasses.replace(answer(), outputs={"y": np.random.default_rng(1).random((1, 50_000), np.float32)})
    async with fixture.cache(quota_bytes=2 << 20) as cache:
        for i in range(40):  # 8 MB of answers
            cache.store(dataclasses.replace(REQUEST, parameters={"i": i}), big, None)
            await asyncio.sleep(0.002)
    assert (fixture.folder / "cache.db").stat().st_size < 4 << 20
