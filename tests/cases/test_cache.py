"""Cases of caches that users of other serving systems reported: growth, other tenants' answers, fields left out."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from common.clock import SystemBootClock
from common.request import Response, Stamp
from common.transport.tenants import TenantOptions, key_sha256, new_key
from edge import CacheOptions
from edge.disk_rows import open_rows
from tests.cases.live import INFER, HeldEngine, body, held_node, put

KEPT = CacheOptions(enabled=True)


def test_case_4_fifty_thousand_keys_that_never_come_again_cost_the_last_one_no_more_than_the_first(
    tmp_path: Path,
) -> None:
    """Serving 4: with all-unique inputs a cache is slower than none: look-ups and evictions grow with what it holds."""
    stamp = Stamp(target="edge", model="m", version="1", by="node")
    response = Response(outputs={"y": np.zeros((1, 8), np.float32)}, stamp=stamp)
    rows = open_rows(tmp_path, 8 << 20, SystemBootClock())  # room for a part of them: most evict another one
    clock = time.thread_time_ns  # what others do on this machine meanwhile does not count
    took: dict[str, list[int]] = {"get": [], "put": []}
    first: dict[str, float] = {}
    try:
        for number in range(50_000):
            key, start = f"{number:064x}", clock()
            if number % 10 == 0:
                assert rows.read(key, "m", "1", 1e6) is None
                took["get"].append(clock() - start)
                start = clock()
            rows.write(key, response)
            took["put"].append(clock() - start)
            if number % 10_000 == 9_999:
                # the worst hundredth: one put in ten makes room, for ten rows
                worst = {name: float(np.quantile(spent, 0.99)) for name, spent in took.items()}
                first = first or worst
                for name, spent_ns in worst.items():
                    assert spent_ns < 6 * first[name], f"{name}, key {number}: {worst}, at first {first}"
                took = {"get": [], "put": []}
        assert rows.read(f"{0:064x}", "m", "1", 1e6) is None  # it did make room
        assert rows.read(f"{49_999:064x}", "m", "1", 1e6) is not None
    finally:
        rows.close()


async def test_case_15_another_tenants_answer_is_never_served(tmp_path: Path) -> None:
    """Serving 15: two tenants, the same body: one gets what was made for the other."""
    keys = {name: new_key() for name in ("hotel", "clinic")}
    tenants = tuple(TenantOptions(name=name, key_sha256=(key_sha256(key),)) for name, key in keys.items())
    async with (
        held_node(tmp_path, cache=KEPT, tenants=tenants) as (node, engine),
        aiohttp.ClientSession(node.endpoint()["http"]) as session,
    ):

        async def ask(tenant: str, **more: str) -> str:
            headers = {"Authorization": f"Bearer {keys[tenant]}", **more}
            async with session.post(INFER, json=body(), headers=headers) as reply:
                assert reply.status == 200
                return reply.headers["x-outrider-target"]

        assert await ask("hotel") == "edge"
        assert await _soon_cached(lambda: ask("hotel"))
        ran = len(engine.batches)
        assert await ask("clinic", **{"x-outrider-tenant": "hotel"}) == "edge"  # a stranger's word does not count
        assert len(engine.batches) == ran + 1
        assert await _soon_cached(lambda: ask("clinic"))
        assert await ask("hotel") == "cache"
        async with session.post(INFER, json=body()) as reply:
            assert reply.status == 401


async def _soon_cached(ask: Any) -> bool:
    """Answers are stored behind the call: the next one, or the one after it, is served from there."""
    async with asyncio.timeout(5):
        while await ask() != "cache":
            await asyncio.sleep(0.01)
    return True


VARIED: tuple[dict[str, Any], ...] = (
    body((1.0, 2.5)),
    body((1.0, 2.0), (1.0, 2.0)),
    body(outputs=[{"name": "half"}]),
    body(outputs=[{"name": "logits"}]),
    body(outputs=[{"name": "half"}, {"name": "logits"}]),
    body(outputs=[{"name": "logits", "parameters": {"classification": 1}}]),
    body(parameters={"classification": 2}),
    body(parameters={"note": "x"}),
    body(parameters={"note": True}),
    body(parameters={"note": 1}),
    body(parameters={"note": 1.0}),
    body(parameters={"note": "1"}),
    body(parameters={"other": "x"}),
)


async def test_case_16_every_field_that_an_answer_depends_on_is_in_its_key(tmp_path: Path) -> None:
    """Serving 16: the key misses fields, and a request gets the answer of another one."""
    async with (
        held_node(tmp_path, cache=KEPT) as (node, engine),
        aiohttp.ClientSession(node.endpoint()["http"]) as session,
    ):

        async def ask(one: dict[str, Any]) -> tuple[str, Any]:
            async with session.post(INFER, json=one) as reply:
                assert reply.status == 200
                return reply.headers["x-outrider-target"], (await reply.json())["outputs"]

        async def target() -> str:
            return (await ask(body()))[0]

        _, plain = await ask(body())
        assert await _soon_cached(target)
        seen = {}
        for number, one in enumerate(VARIED):
            where, seen[number] = await ask(one)
            assert where == "edge", one  # nobody has asked this before
        for number, one in enumerate(VARIED):  # and each finds its own again
            assert (await ask(one))[1] == seen[number]
        assert await ask(body()) == ("cache", plain)
        put(node.local, second := HeldEngine(), "2")
        assert (await ask(body()))[0] == "edge"  # another version's answer is another answer
        assert (engine.batches[-1], second.batches) == (1, [1])
