"""Identical calls at the same time: one execution, and nobody is hurt by how another one's call ends."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from common.errors import DeadlineExceeded, EngineError, InvalidInput, OutriderError, TargetUnreachable
from common.request import Context, Priority, Privacy, Reason, Request, Response, Stamp
from common.serving.answer_cache import Lookup, cache_key, request_digest
from common.serving.dataplane import DataPlane
from common.serving.policy import Only
from common.serving.router import Router
from common.serving.target import Estimate, Readiness
from tests.common.transport.fakes import FakeCatalog

REQUEST = Request(model="m", inputs={"x": np.ones((1, 2), np.float32)})
ALMOST = 0.01  # seconds for what is under way to get there


class Forgetful:
    """A cache that keeps nothing, for models whose answers are of version 1 and may be kept."""

    async def lookup(self, request: Request) -> Lookup:
        digest = request_digest(request)
        key = cache_key(request, "1", digest, is_public=False)
        return Lookup(digest=digest, key=key if request.context.privacy is Privacy.ANY else None, version="1")

    kept: asyncio.Future[None] | None = None

    def store(self, request: Request, response: Response, digest: bytes | None) -> asyncio.Future[None] | None:
        return self.kept


class Held:
    """A target that answers when it is let go, or fails with what it is told to."""

    name = "edge"

    def __init__(self) -> None:
        self.calls = 0
        self.go = asyncio.Event()
        self.problems: list[OutriderError | None] = []
        self.version, self.model = "1", "m"

    async def infer(self, request: Request) -> Response:
        self.calls += 1
        await asyncio.sleep(0)  # like any device, it is elsewhere
        left_s = request.context.deadline - time.monotonic()
        try:
            async with asyncio.timeout(min(left_s, 10.0)):
                await self.go.wait()
        except TimeoutError:
            raise DeadlineExceeded(request.model, "in the queue") from None
        if self.problems and (problem := self.problems.pop(0)) is not None:
            raise problem
        stamp = Stamp(target="edge", model=self.model, version=self.version, by="engine", reason=Reason.OVERLOAD)
        return Response(outputs={"y": request.inputs["x"] * 2}, stamp=stamp)

    def readiness(self, model: str, version: str | None = None) -> Readiness:
        return Readiness.READY

    def estimate(self, request: Request) -> Estimate:
        return Estimate()


class Bench:
    def __init__(self) -> None:
        self.target = Held()
        router = Router([self.target], Only("edge"))
        self.cache = Forgetful()
        self.plane = DataPlane(name="node", router=router, catalog=FakeCatalog(), cache=self.cache)

    async def start(self, count: int = 1, **context: Any) -> list[asyncio.Task[Response]]:
        """Calls that are under way, each behind the one before it."""
        request = structs.replace(REQUEST, context=Context(**context))
        calls = [asyncio.create_task(self.plane.infer(request)) for _ in range(count)]
        await asyncio.sleep(ALMOST)
        return calls

    async def end(self, calls: list[asyncio.Task[Response]]) -> list[Any]:
        self.target.go.set()
        async with asyncio.timeout(5):
            return await asyncio.gather(*calls, return_exceptions=True)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_identical_calls_are_executed_once_and_each_answer_says_where_it_is_from(bench: Bench) -> None:
    answers = await bench.end(await bench.start(50))
    assert bench.target.calls == 1
    assert [answer.stamp.target for answer in answers] == ["edge"] + ["cache"] * 49
    assert answers[1].stamp == Stamp(target="cache", model="m", version="1", by="node")
    for answer in answers:
        np.testing.assert_array_equal(answer.outputs["y"], [[2.0, 2.0]])


async def test_nobody_can_change_the_answer_of_another_caller(bench: Bench) -> None:
    one, other = await bench.end(await bench.start(2))
    for answer in (one, other):
        with pytest.raises(ValueError, match="read-only"):
            answer.outputs["y"][0, 0] = 7.0


async def test_the_next_call_is_executed_again(bench: Bench) -> None:
    await bench.end(await bench.start(2))
    await bench.end(await bench.start(1))
    assert bench.target.calls == 2


async def test_a_call_whose_look_up_was_too_early_for_the_cache_still_finds_the_answer(bench: Bench) -> None:
    """Its look-up missed before the answer was kept, and is heard of after the leader is done."""
    bench.cache.kept = asyncio.get_running_loop().create_future()
    [first] = await bench.end(await bench.start())
    [second] = await bench.end(await bench.start())
    assert (first.stamp.target, second.stamp.target, bench.target.calls) == ("edge", "cache", 1)
    bench.cache.kept.set_result(None)
    [third] = await bench.end(await bench.start())
    assert (third.stamp.target, bench.target.calls) == ("edge", 2)


async def test_a_leader_that_is_cancelled_takes_nobody_with_it(bench: Bench) -> None:
    leader, *followers = await bench.start(10)
    leader.cancel()
    await asyncio.sleep(ALMOST)
    answers = await bench.end([leader, *followers])
    assert isinstance(answers[0], asyncio.CancelledError)
    assert sorted(answer.stamp.target for answer in answers[1:]) == ["cache"] * 8 + ["edge"]
    assert bench.target.calls == 2


async def test_a_follower_that_is_cancelled_leaves_the_others_alone(bench: Bench) -> None:
    calls = await bench.start(3)
    calls[1].cancel()
    answers = await bench.end(calls)
    assert isinstance(answers[1], asyncio.CancelledError)
    assert [answers[0].stamp.target, answers[2].stamp.target] == ["edge", "cache"]
    assert bench.target.calls == 1


async def test_when_the_leaders_deadline_passes_a_follower_takes_its_place(bench: Bench) -> None:
    calls = await bench.start(deadline=time.monotonic() + 0.1) + await bench.start(5)
    await asyncio.sleep(0.2)
    first, *others = await bench.end(calls)
    assert isinstance(first, DeadlineExceeded)
    assert sorted(answer.stamp.target for answer in others) == ["cache"] * 4 + ["edge"]
    assert bench.target.calls == 2


async def test_a_follower_hears_at_its_own_deadline(bench: Bench) -> None:
    calls = await bench.start() + await bench.start(deadline=time.monotonic() + 0.1)
    async with asyncio.timeout(2):
        with pytest.raises(DeadlineExceeded, match="identical"):
            await calls[1]
    assert not calls[0].done()
    [answer] = await bench.end(calls[:1])
    assert answer.stamp.target == "edge"


@pytest.mark.parametrize("problem", [InvalidInput("x", "bad"), EngineError("m", "no memory")])
async def test_a_failure_that_is_everyones_is_handed_to_all(bench: Bench, problem: OutriderError) -> None:
    bench.target.problems = [problem]
    results = await bench.end(await bench.start(20))
    assert results == [problem] * 20
    assert bench.target.calls == 1


async def test_what_the_leaders_little_time_may_have_caused_is_not_handed_on(bench: Bench) -> None:
    bench.target.problems = [TargetUnreachable("cloud", "refused")]  # the edge would have been too slow for it
    calls = await bench.start(deadline=time.monotonic() + 1.0) + await bench.start(5)
    first, *others = await bench.end(calls)
    assert isinstance(first, TargetUnreachable)
    assert sorted(answer.stamp.target for answer in others) == ["cache"] * 4 + ["edge"]


@pytest.mark.parametrize(("version", "model"), [("2", "m"), ("1", "smaller")])
async def test_an_answer_of_another_version_or_model_is_its_own_callers_alone(
    bench: Bench, version: str, model: str
) -> None:
    bench.target.version, bench.target.model = version, model
    answers = await bench.end(await bench.start(3))
    assert bench.target.calls == 3
    assert {(answer.stamp.target, answer.stamp.version, answer.stamp.model) for answer in answers} == {
        ("edge", version, model)
    }


@pytest.mark.parametrize(
    "context",
    [
        {"tenant": "other"},
        {"priority": Priority.REALTIME},  # must not wait in a lower class's queue
        {"pin": "1"},
        {"privacy": Privacy.DEVICE_ONLY},
    ],
)
async def test_calls_that_are_not_identical_do_not_wait_for_each_other(bench: Bench, context: dict[str, Any]) -> None:
    answers = await bench.end(await bench.start() + await bench.start(**context))
    assert bench.target.calls == 2
    assert [answer.stamp.target for answer in answers] == ["edge", "edge"]


async def test_what_may_not_be_kept_is_not_shared(bench: Bench) -> None:
    answers = await bench.end(await bench.start(3, privacy=Privacy.DEVICE_ONLY))
    assert bench.target.calls == 3
    assert [answer.stamp.target for answer in answers] == ["edge"] * 3
