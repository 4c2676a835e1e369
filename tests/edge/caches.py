"""A disk cache over a repository of fake engines, and hands on its database from outside: through sqlite3 alone."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy as np

from common.bundle import CacheRules
from common.request import Request, Response, Stamp
from common.serving.repository import Installed, Repository
from common.telemetry.events import CacheFault
from edge.disk_cache import DiskCache
from tests.fakes import FakeBootClock, FakeEngine, config, loaded

REQUEST = Request(model="double", inputs={"x": np.ones((1, 2), np.float32)})


def answer(version: str = "1", y: float = 2.0, columns: int = 2, identity: str = "") -> Response:
    labels = np.array([[b"a", b"bc"]], dtype=object)
    return Response(
        outputs={"y": np.full((1, columns), y, np.float32), "labels": labels},
        stamp=Stamp(target="edge", model="double", version=version, by="node", identity=identity),
    )


class Fixture:
    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, FakeBootClock()
        self.events: list[object] = []
        self.repository = Repository(lambda what: loaded(FakeEngine(), what.version), lambda engine: None)
        self.serve("1")

    def serve(self, version: str, rules: CacheRules | None = None, identity: str = "") -> None:
        model = dataclasses.replace(config(), cache=rules or CacheRules())
        installed = Installed(model="double", version=version, folder=Path("/"), variant="full", engine="fake")
        engine = dataclasses.replace(loaded(FakeEngine(), version, model), identity=identity)
        self.repository.activate(engine, installed)

    @asynccontextmanager
    async def cache(self, **options: Any) -> AsyncIterator[DiskCache]:
        options = {"clock": self.clock, "on_event": self.events.append, **options}
        async with DiskCache(self.folder, self.repository, by="node", **options) as cache:
            yield cache

    @property
    def faults(self) -> list[CacheFault]:
        return [event for event in self.events if isinstance(event, CacheFault)]

    def sql(self, statement: str, *values: object) -> list[Any]:
        with closing(sqlite3.connect(self.folder / "cache.db")) as db, db:
            return db.execute(statement, values).fetchall()

    def rows(self) -> int:
        [(count,)] = self.sql("SELECT COUNT(*) FROM Cache")
        return int(count)


async def store(cache: DiskCache, request: Request, response: Response) -> None:
    """As the data plane does it: what is stored has been looked up."""
    kept = cache.store(request, response, (await cache.lookup(request)).digest)
    if kept is not None:
        await kept


async def read(cache: DiskCache, request: Request = REQUEST) -> Response | None:
    return (await cache.lookup(request)).response
