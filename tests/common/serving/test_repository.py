import asyncio
import threading
from pathlib import Path

import pytest

from common.errors import EngineError, ModelNotFound, ModelNotReady, VersionNotFound
from common.serving.catalog import ModelState, ModelStatus
from common.serving.engine import Engine
from common.serving.repository import Installed, Repository
from common.serving.slot import LoadedEngine
from common.serving.target import Readiness
from common.telemetry.events import EngineSwapped
from tests.fakes import FakeEngine, loaded


def installed(version: str = "1") -> Installed:
    return Installed(model="double", version=version, folder=Path("/nowhere"), variant="full", engine="fake")


class Fixture:
    def __init__(self) -> None:
        self.opened: list[FakeEngine] = []
        self.closed: list[Engine] = []
        self.events: list[object] = []
        self.problem: Exception | None = None
        self.repository = Repository(self.open, self.closed.append, on_event=self.events.append)

    def open(self, what: Installed) -> LoadedEngine:
        assert threading.current_thread() is not threading.main_thread()  # never on the event loop
        if self.problem is not None:
            raise self.problem
        self.opened.append(FakeEngine())
        return loaded(self.opened[-1], what.version)


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


async def test_an_activated_engine_is_leased_and_listed(fixture: Fixture) -> None:
    fixture.repository.activate(loaded(FakeEngine(), "3"), installed("3"))
    lease = fixture.repository.lease("double")
    assert lease.loaded.version == "3"
    lease.release()
    assert await fixture.repository.index() == [ModelStatus(name="double", version="3", state=ModelState.READY)]
    assert (await fixture.repository.metadata("double", None)).versions == ("3",)


async def test_unknown_models_and_versions_name_what_is_known(fixture: Fixture) -> None:
    fixture.repository.activate(loaded(FakeEngine()), installed())
    with pytest.raises(ModelNotFound, match="known models: double"):
        fixture.repository.lease("nope")
    with pytest.raises(VersionNotFound, match="versions served: 1"):
        fixture.repository.lease("double", "9")
    assert fixture.repository.readiness("double", "9") is Readiness.ABSENT
    assert fixture.repository.readiness("double", "1") is Readiness.READY
    fixture.repository.close()  # the refused pin left no lease behind
    assert len(fixture.closed) == 1


async def test_unload_takes_the_engine_and_load_brings_the_installed_version_back(fixture: Fixture) -> None:
    repository = fixture.repository
    repository.activate(loaded(FakeEngine(), "2"), installed("2"))
    await repository.unload("double")
    assert repository.readiness("double") is Readiness.ABSENT
    assert len(fixture.closed) == 1
    with pytest.raises(ModelNotReady, match="unloaded"):
        repository.lease("double")
    assert (await repository.index())[0].state is ModelState.UNAVAILABLE
    await repository.load("double")
    await repository.load("double")  # a second time does nothing
    assert len(fixture.opened) == 1
    assert repository.lease("double").loaded.version == "2"
    assert [e for e in fixture.events if isinstance(e, EngineSwapped)][-1].new_version == "2"


async def test_a_version_that_arrives_while_unloaded_waits_for_load(fixture: Fixture) -> None:
    repository = fixture.repository
    repository.activate(loaded(FakeEngine(), "1"), installed("1"))
    await repository.unload("double")
    repository.activate(loaded(FakeEngine(), "2"), installed("2"))
    assert repository.readiness("double") is Readiness.ABSENT
    await repository.load("double")
    assert repository.lease("double").loaded.version == "2"


async def test_a_load_that_fails_says_why_and_can_be_tried_again(fixture: Fixture) -> None:
    repository = fixture.repository
    repository.activate(loaded(FakeEngine()), installed())
    await repository.unload("double")
    fixture.problem = EngineError("double", "no memory")
    with pytest.raises(EngineError):
        await repository.load("double")
    assert "no memory" in (await repository.index())[0].reason
    fixture.problem = None
    await repository.load("double")
    assert repository.readiness("double") is Readiness.READY


async def test_building_shows_until_the_engine_is_up(fixture: Fixture) -> None:
    repository = fixture.repository
    repository.start_building("double", "version 1")
    assert repository.readiness("double") is Readiness.BUILDING
    with pytest.raises(ModelNotReady, match="version 1"):
        repository.lease("double")
    repository.activate(loaded(FakeEngine()), installed())
    assert repository.readiness("double") is Readiness.READY


async def test_an_unload_while_a_version_is_activated_wins_or_comes_first_but_never_serves_after(
    fixture: Fixture,
) -> None:
    repository = fixture.repository
    for version in range(1, 60):
        other = threading.Thread(
            target=repository.activate, args=(loaded(FakeEngine(), str(version)), installed(str(version)))
        )
        repository.activate(loaded(FakeEngine(), "0"), installed("0"))
        other.start()
        await repository.unload("double")
        other.join()
        assert repository.current("double") is None
        await repository.load("double")


async def test_a_load_whose_caller_leaves_leaves_no_engine_behind(fixture: Fixture) -> None:
    repository = fixture.repository
    repository.activate(loaded(FakeEngine()), installed())
    await repository.unload("double")
    opening, go_on = threading.Event(), threading.Event()
    original = fixture.open

    def slow(what: Installed) -> LoadedEngine:
        opening.set()
        assert go_on.wait(5)
        return original(what)

    repository._open = slow
    leaving = asyncio.create_task(repository.load("double"))
    await asyncio.to_thread(opening.wait, 5)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    go_on.set()
    async with asyncio.timeout(5):
        while repository.current("double") is None:
            await asyncio.sleep(0.01)
    assert len(fixture.opened) == 1  # it serves: it was not lost
