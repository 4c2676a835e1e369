from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import SystemClock
from sync.broker import broker
from sync.hints import MAX_HINT_BYTES, Announcer, Hint, Listener, make_hint, parse_hint
from sync.service import ServiceConfig, service
from tests.sync.fakes import FakeInstaller, World, weights


def timestamp(version: int) -> bytes:
    return json.dumps({"signed": {"version": version}, "signatures": []}).encode()


@contextlib.asynccontextmanager
async def beside(*runs: object) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(run) for run in runs]  # type: ignore[call-overload]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def eventually(is_so: Callable[[], bool], within_s: float = 5.0) -> bool:
    for _ in range(int(within_s / 0.01)):
        if is_so():
            return True
        await asyncio.sleep(0.01)
    return False


def test_a_hint_says_which_timestamp_and_how_to_spread() -> None:
    assert parse_hint(make_hint(timestamp(7), 500)) == Hint(timestamp_version=7, spread_ms=500)


@given(payload=st.binary(max_size=200))
def test_garbage_is_no_hint(payload: bytes) -> None:
    assert parse_hint(payload) is None


@pytest.mark.parametrize(
    "message",
    [
        {"timestamp": "{}", "spread_ms": 0, "format": 1},
        {"timestamp": "[]", "spread_ms": 0, "format": 1},
        {"timestamp": "[" * 60_000, "spread_ms": 0, "format": 1},
        {"timestamp": '{"signed": 3}', "spread_ms": 0, "format": 1},
        {"timestamp": '{"signed": {"version": true}}', "spread_ms": 0, "format": 1},
        {"timestamp": '{"signed": {"version": 1}}', "spread_ms": -1, "format": 1},
        {"timestamp": '{"signed": {"version": 1}}', "spread_ms": 0, "format": 2},
        {"timestamp": '{"signed": {"version": 1}}' + " " * MAX_HINT_BYTES, "spread_ms": 0, "format": 1},
    ],
)
def test_a_message_that_only_looks_like_a_hint_is_none(message: dict[str, object]) -> None:
    assert parse_hint(json.dumps(message).encode()) is None


async def test_a_listener_hears_what_is_announced_and_a_late_one_the_last() -> None:
    early: list[Hint] = []
    late: list[Hint] = []
    async with broker() as address:
        announcer = Announcer(address, group="g", spread_ms=3)
        async with beside(announcer.run(), Listener(address, early.append, group="g").run()):
            announcer.announce(timestamp(1))
            assert await eventually(lambda: [hint.timestamp_version for hint in early] == [1])
            announcer.announce(timestamp(2))
            assert await eventually(lambda: [hint.timestamp_version for hint in early] == [1, 2])
            async with beside(Listener(address, late.append, group="g").run()):
                assert await eventually(lambda: late != [])
    assert set(late) == {Hint(timestamp_version=2, spread_ms=3)}  # at least once: a broker may repeat itself


async def test_after_a_broker_restart_the_hint_is_announced_again() -> None:
    heard: list[Hint] = []
    async with contextlib.AsyncExitStack() as stack:
        async with broker() as address:
            announcer = Announcer(address)
            await stack.enter_async_context(beside(announcer.run(), Listener(address, heard.append).run()))
            announcer.announce(timestamp(1))
            assert await eventually(lambda: len(heard) == 1)
        announcer.announce(timestamp(2))  # into the void
        host, _, port = address.rpartition(":")
        async with broker(host, int(port)):
            assert await eventually(lambda: heard[-1].timestamp_version == 2)


async def test_a_group_hears_its_own_hints_only() -> None:
    heard: list[Hint] = []
    async with broker() as address:
        one, other = Announcer(address, group="one"), Announcer(address, group="other")
        async with beside(one.run(), other.run(), Listener(address, heard.append, group="one").run()):
            other.announce(timestamp(9))
            one.announce(timestamp(1))
            assert await eventually(lambda: len(heard) == 1)
            await asyncio.sleep(0.05)
    assert [hint.timestamp_version for hint in heard] == [1]


async def test_a_publish_reaches_a_node_through_the_broker_long_before_its_interval(world: World) -> None:
    world.publish(weights(0))
    installer = FakeInstaller()
    async with broker() as mqtt:
        config = ServiceConfig(store=str(world.store.root), broker=mqtt)
        async with service(config) as address:
            agent = world.agent(
                installer, source=None, address=address, clock=SystemClock(), interval_s=900.0, min_gap_s=0.05
            )
            agent.start()
            async with beside(Listener(mqtt, agent.hint).run()):
                assert await eventually(lambda: installer.serving == {"digits": "1"})
                await asyncio.to_thread(world.publish, weights(1))
                assert await eventually(lambda: installer.serving == {"digits": "2"})
            await asyncio.to_thread(agent.stop)


async def test_the_service_serves_without_its_broker(world: World) -> None:
    world.publish(weights(0))
    installer = FakeInstaller()
    async with service(ServiceConfig(store=str(world.store.root), broker="127.0.0.1:9")) as address:
        agent = world.agent(installer, source=None, address=address)
        assert await asyncio.to_thread(agent.run_once)
        await asyncio.to_thread(agent.close)
    assert installer.serving == {"digits": "1"}
