import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest

from common.errors import DeadlineExceeded, InvalidInput
from common.request import Context, Priority
from common.serving.decoding import Decoders


@pytest.fixture
async def decoders() -> AsyncIterator[Decoders]:
    async with Decoders(threads=1) as one:
        yield one


async def test_results_and_errors_come_back(decoders: Decoders) -> None:
    assert await decoders.run(lambda: 7, "m", Context()) == 7

    def broken() -> int:
        raise InvalidInput("image", "broken")

    with pytest.raises(InvalidInput):
        await decoders.run(broken, "m", Context())


async def test_urgent_work_goes_first_and_late_work_is_not_done(decoders: Decoders) -> None:
    gate, done = threading.Event(), list[str]()
    blocking = asyncio.create_task(decoders.run(lambda: gate.wait(5), "m", Context()))
    await asyncio.sleep(0.02)
    soon = time.monotonic() + 0.05
    late = asyncio.create_task(decoders.run(lambda: done.append("late"), "m", Context(deadline=soon)))
    low = asyncio.create_task(decoders.run(lambda: done.append("low"), "m", Context(priority=Priority.BATCH)))
    high = asyncio.create_task(decoders.run(lambda: done.append("high"), "m", Context(priority=Priority.REALTIME)))
    with pytest.raises(DeadlineExceeded):
        await late
    assert time.monotonic() - soon < 1.0  # at the deadline, not when the thread is free
    gate.set()
    await asyncio.gather(blocking, low, high)
    assert done == ["high", "low"]


async def test_work_of_a_caller_that_left_is_not_done(decoders: Decoders) -> None:
    gate, done = threading.Event(), list[int]()
    blocking = asyncio.create_task(decoders.run(lambda: gate.wait(5), "m", Context()))
    await asyncio.sleep(0.02)
    left = asyncio.create_task(decoders.run(lambda: done.append(1), "m", Context()))
    await asyncio.sleep(0.02)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    gate.set()
    await blocking
    await decoders.run(lambda: None, "m", Context())
    assert done == []
