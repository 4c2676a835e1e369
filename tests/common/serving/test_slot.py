import pytest

from common.errors import EngineError
from common.serving.engine import Engine
from common.serving.slot import EngineSlot
from tests.fakes import FakeEngine, loaded


def test_the_old_engine_closes_when_its_last_lease_ends_and_not_before() -> None:
    closed: list[Engine] = []
    slot = EngineSlot("double", closed.append)
    old, new = FakeEngine(), FakeEngine()
    slot.swap(loaded(old, "1"))
    first, second = slot.acquire(), slot.acquire()
    assert first is not None
    assert second is not None
    slot.swap(loaded(new, "2"))
    assert slot.current is not None
    assert slot.current.version == "2"
    assert first.loaded.version == "1"
    first.release()
    assert closed == []
    second.release()
    assert closed == [old]


def test_an_idle_engine_closes_at_the_swap() -> None:
    closed: list[Engine] = []
    slot = EngineSlot("double", closed.append)
    old = FakeEngine()
    slot.swap(loaded(old))
    slot.swap(None)
    assert closed == [old]
    assert slot.acquire() is None


def test_a_lease_that_is_released_twice_is_an_error() -> None:
    slot = EngineSlot("double", lambda _engine: None)
    slot.swap(loaded(FakeEngine()))
    lease = slot.acquire()
    assert lease is not None
    lease.release()
    with pytest.raises(EngineError, match="released twice"):
        lease.release()
