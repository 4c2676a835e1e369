"""The books of the load: whatever a call or the pacing comes to is counted, and told as a problem unless right.

The client is a fake one here: it does what a sound client never should.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from common.errors import TargetUnreachable
from edge.client import AsyncClient
from edge.client.caller import Answer
from tests.soak import load as under_test
from tests.soak.load import Load, Seen
from tests.soak.test_truth import answer
from tests.system.running import Up

RATE, SECONDS = 100.0, 0.3
Infer = Callable[[int], Awaitable[Answer]]


class _Client:
    """Answers photos; `digit` makes the answer, or the end, of each other call from its number."""

    def __init__(self, digit: Infer) -> None:
        self._digit, self._numbers = digit, iter(range(1_000_000))

    async def infer(self, model: str, inputs: dict[str, Any], classes: int = 0) -> Answer:
        if model != "digits":
            return answer(np.array([[b"0.9:1:a"]], dtype=object), model=model)
        return await self._digit(next(self._numbers))


async def _seen(tmp_path: Path, digit: Infer, do: Callable[[Load], Awaitable[Any]] | None = None) -> Seen:
    """What came of `SECONDS` at `RATE`; `do` happens in their midst."""
    photos = tmp_path / "sources" / "efficientnet-lite0-v1" / "photos"
    photos.mkdir(parents=True)
    (photos / "one.jpg").write_bytes(b"photo")
    up = Up(tmp_path / "state", tmp_path)
    up.endpoints.parent.mkdir()
    names = [f'{{"name": "{name}", "grpc": ""}}' for name in ("edge-a", "edge-b", "gateway")]
    up.endpoints.write_text(f'{{"processes": [{", ".join(names)}]}}')
    one = _Client(digit)

    class OneClient(Load):
        async def _client(self, endpoints: Any) -> AsyncClient:
            return cast(AsyncClient, one)

    async with OneClient(up, RATE) as load:
        await asyncio.sleep(SECONDS / 2)
        if do is not None:
            await do(load)
        await asyncio.sleep(SECONDS / 2)
    return load.seen


async def _good(_: int) -> Answer:
    return answer(np.zeros((1, 10), np.float32))


async def test_calls_that_are_answered_are_no_problem(tmp_path: Path) -> None:
    seen = await _seen(tmp_path, _good)
    assert seen.problems() == []
    assert len(seen.seconds) == seen.calls >= 0.9 * RATE * SECONDS


@pytest.mark.parametrize(
    "error", [TargetUnreachable("edge-a", "gone"), RuntimeError("x"), ValueError("x"), asyncio.CancelledError()]
)
async def test_whatever_a_call_raises_is_a_failed_call(tmp_path: Path, error: BaseException) -> None:
    async def every_other(number: int) -> Answer:
        if number % 2:
            raise error
        return await _good(number)

    seen = await _seen(tmp_path, every_other)
    assert seen.failed == seen.errors[type(error).__name__] >= 0.4 * seen.calls
    assert len(seen.seconds) + seen.failed == seen.calls
    assert f"{seen.failed} of {seen.calls} calls failed" in seen.problems()
    assert f"failed with {type(error).__name__} ({seen.failed})" in seen.problems()


@pytest.mark.parametrize("logits", [np.zeros((1, 9), np.float32), None])
async def test_an_answer_without_its_output_is_a_failed_call(tmp_path: Path, logits: Any) -> None:
    async def odd(_: int) -> Answer:
        return answer(logits)

    seen = await _seen(tmp_path, odd)
    assert seen.errors["ValueError" if logits is not None else "KeyError"] == seen.failed > 0


async def test_a_stuck_call_is_a_failed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "CALL_S", 0.1)

    async def stuck(number: int) -> Answer:
        await asyncio.sleep(60 if number == 3 else 0)
        return await _good(number)

    seen = await _seen(tmp_path, stuck)
    assert seen.errors == {"TimeoutError": 1}
    assert (seen.failed, seen.late) == (1, 0)


async def test_a_call_given_up_at_the_end_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "LATE_S", 0.1)

    async def stuck(number: int) -> Answer:
        await asyncio.sleep(60 if number == 3 else 0)
        return await _good(number)

    seen = await _seen(tmp_path, stuck)
    assert (seen.failed, seen.late) == (0, 1)
    assert seen.problems() == [f"1 of {seen.calls} calls unanswered"]


async def test_pacing_that_dies_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def break_it(load: Load) -> None:
        monkeypatch.setattr(load, "_rate", 0)  # the next call divides by it

    seen = await _seen(tmp_path, _good, break_it)
    assert any("pacing of the calls ended before its time: ZeroDivisionError" in text for text in seen.problems())


async def test_fewer_calls_than_the_rate_asks_for_are_a_problem(tmp_path: Path) -> None:
    async def stall(_: Load) -> None:
        time.sleep(0.3)  # the loop itself stands; the calls that were due meanwhile are made up for

    assert (await _seen(tmp_path, _good, stall)).problems() == []
    few = Seen(due=100.0, calls=89, seconds=[0.1] * 89)
    assert few.problems() == ["only 89 calls were made of the 100 that the rate asks for"]
    assert Seen().problems() == ["no call was made"]


def test_calls_that_never_ended_and_calls_that_took_too_long_are_problems() -> None:
    assert Seen(due=2.0, calls=2, seconds=[0.1]).problems() == ["2 calls, but 1 ended: answered, failed or given up"]
    assert Seen(due=1.0, calls=1, seconds=[5.5], longest_s=5.0).problems() == [
        "1 calls took more than 5 s, the longest 5.5 s"
    ]
