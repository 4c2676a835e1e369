import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from common.errors import DeadlineExceeded, EngineError, Overloaded, Unavailable
from common.request import Context, Priority
from common.serving.device import Device
from common.serving.engine import Batch
from common.serving.slot import EngineSlot
from tests.fakes import FakeEngine, config, loaded

X = {"x": np.ones((1, 2), np.float32)}


@pytest.fixture
async def device() -> AsyncIterator[Device]:
    async with Device(max_queue_rows=1000) as one:
        yield one


def slot_with(device: Device, engine: FakeEngine) -> EngineSlot:
    slot = EngineSlot("double", device.close_engine)
    slot.swap(loaded(engine))
    return slot


async def call(device: Device, slot: EngineSlot, x: float = 1.0, rows: int = 1, **context: object) -> np.ndarray:
    lease = slot.acquire()
    assert lease is not None
    inputs = {"x": np.full((rows, 2), x, np.float32)}
    return (await device.run(lease, inputs, rows, Context(**context)))["y"]  # type: ignore[arg-type]


async def test_every_caller_gets_its_own_rows_back(device: Device) -> None:
    slot = slot_with(device, FakeEngine(base_s=0.002))
    answers = await asyncio.gather(*(call(device, slot, x=i, rows=1 + i % 3) for i in range(50)))
    for i, y in enumerate(answers):
        np.testing.assert_array_equal(y, np.full((1 + i % 3, 2), 2.0 * i, np.float32))


async def test_requests_that_arrive_while_the_device_is_busy_share_the_next_batch(device: Device) -> None:
    engine = FakeEngine(gate=threading.Event())
    slot = slot_with(device, engine)
    calls = [asyncio.create_task(call(device, slot, x=i)) for i in range(5)]
    await asyncio.sleep(0.05)
    assert engine.batches == [1]  # the first did not wait for others
    engine.gate.set()  # type: ignore[union-attr]
    await asyncio.gather(*calls)
    assert engine.batches == [1, 4]
    assert len(engine.threads) == 1


async def test_late_requests_get_their_error_while_the_device_is_busy_and_are_never_run(device: Device) -> None:
    engine = FakeEngine(gate=threading.Event())
    slot = slot_with(device, engine)
    long = asyncio.create_task(call(device, slot))
    await asyncio.sleep(0.01)
    start = time.monotonic()
    late = await asyncio.gather(*(call(device, slot, deadline=start + 0.05) for _ in range(50)), return_exceptions=True)
    assert all(isinstance(one, DeadlineExceeded) for one in late)
    assert 0.03 < time.monotonic() - start < 1.0
    engine.gate.set()  # type: ignore[union-attr]
    await long
    assert engine.batches == [1]


async def test_a_deadline_in_the_past_is_refused_at_once(device: Device) -> None:
    engine = FakeEngine()
    slot = slot_with(device, engine)
    with pytest.raises(DeadlineExceeded):
        await call(device, slot, deadline=time.monotonic() - 1)
    assert engine.batches == []


async def test_a_cancelled_caller_leaves_its_neighbours_whole(device: Device) -> None:
    engine = FakeEngine(gate=threading.Event())
    slot = slot_with(device, engine)
    first = asyncio.create_task(call(device, slot, x=1))
    others = [asyncio.create_task(call(device, slot, x=i)) for i in range(2, 8)]
    await asyncio.sleep(0.02)
    others[0].cancel()
    first.cancel()  # this one is already on the device
    await asyncio.sleep(0.02)
    engine.gate.set()  # type: ignore[union-attr]
    answers = await asyncio.gather(*others[1:])
    assert [float(y[0, 0]) for y in answers] == [6, 8, 10, 12, 14]
    assert engine.batches == [1, 5]


async def test_an_engine_that_raises_fails_its_batch_and_serves_the_next(device: Device) -> None:
    slot = slot_with(
        device, FakeEngine(fail=lambda batch: ValueError("odd") if batch.items[0]["x"][0, 0] < 0 else None)
    )
    with pytest.raises(EngineError, match="ValueError: odd"):
        await call(device, slot, x=-1)
    assert float((await call(device, slot, x=3))[0, 0]) == 6


async def test_an_engine_that_answers_with_too_few_rows_fails_instead_of_mixing_callers(device: Device) -> None:
    class Short(FakeEngine):
        def run(self, batch: Batch):  # type: ignore[no-untyped-def]
            return [{"y": item["x"][:-1]} for item in batch.items]

    slot = slot_with(device, Short())
    with pytest.raises(EngineError, match="for 3 rows"):
        await call(device, slot, rows=3)


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async with Device(max_queue_rows=3) as device:
        engine = FakeEngine(gate=threading.Event())
        slot = slot_with(device, engine)
        calls = [asyncio.create_task(call(device, slot)) for _ in range(4)]
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded) as caught:
            await call(device, slot)
        assert (caught.value.queued, caught.value.limit) == (3, 3)
        engine.gate.set()  # type: ignore[union-attr]
        await asyncio.gather(*calls)


async def test_a_swap_under_load_fails_nobody_and_closes_the_old_engine_after_its_last_request(device: Device) -> None:
    engines = [FakeEngine(factor=1.0, base_s=0.001)]
    slot = slot_with(device, engines[0])

    async def load() -> list[float]:
        answers = []
        while len(engines) < 20:
            answers.append(float((await call(device, slot))[0, 0]))
        return answers

    async def swaps() -> None:
        for version in range(2, 21):
            await asyncio.sleep(0.005)
            engines.append(FakeEngine(factor=float(version), base_s=0.001))
            slot.swap(loaded(engines[-1], str(version)))

    _, *answers = await asyncio.gather(swaps(), *(load() for _ in range(8)))
    for one in answers:
        assert one == sorted(one)  # a caller never goes back to an older version
        assert set(one) <= {float(version) for version in range(1, 21)}
    await asyncio.to_thread(time.sleep, 0.05)
    assert [engine.is_closed for engine in engines] == [True] * 19 + [False]


async def test_a_call_is_answered_at_its_deadline_even_while_the_engine_runs_it(device: Device) -> None:
    engine = FakeEngine(gate=threading.Event())
    slot = slot_with(device, engine)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="while the engine was running"):
        await call(device, slot, deadline=start + 0.05)
    assert time.monotonic() - start < 1.0
    engine.gate.set()  # type: ignore[union-attr]
    assert float((await call(device, slot, x=3))[0, 0]) == 6  # the engine is free again


@pytest.mark.parametrize("answer", [None, [None], [{"y": 1}]])
async def test_an_engine_that_answers_nonsense_fails_its_caller_and_serves_on(device: Device, answer: object) -> None:
    class Odd(FakeEngine):
        def run(self, batch: Batch):  # type: ignore[no-untyped-def]
            return super().run(batch) if batch.items[0]["x"][0, 0] > 0 else answer

    slot = slot_with(device, Odd())
    with pytest.raises(EngineError):
        await call(device, slot, x=-1)
    assert float((await call(device, slot, x=3))[0, 0]) == 6


async def test_an_engine_that_cannot_be_closed_does_not_stop_the_device(device: Device) -> None:
    class Sticky(FakeEngine):
        def close(self) -> None:
            raise RuntimeError("busy")

    slot = slot_with(device, Sticky())
    slot.swap(loaded(FakeEngine(), "2"))
    assert float((await call(device, slot, x=3))[0, 0]) == 6


async def test_one_slow_batch_does_not_keep_later_calls_away(device: Device) -> None:
    engine = FakeEngine(base_s=0.01)
    slot = slot_with(device, engine)
    await call(device, slot)
    engine.base_s = 0.3  # one stall
    await call(device, slot)
    engine.base_s = 0.01
    for _ in range(10):
        await call(device, slot, deadline=time.monotonic() + 0.05)


async def test_a_flood_of_a_low_class_does_not_refuse_a_higher_one() -> None:
    async with Device(max_queue_rows=8) as device:
        engine = FakeEngine(gate=threading.Event())
        slot = slot_with(device, engine)
        first = asyncio.create_task(call(device, slot))
        await asyncio.sleep(0.01)
        flood = [asyncio.create_task(call(device, slot, priority=Priority.OFFLINE)) for _ in range(8)]
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await call(device, slot, priority=Priority.OFFLINE)
        urgent = asyncio.create_task(call(device, slot, priority=Priority.REALTIME))
        await asyncio.sleep(0.01)
        engine.gate.set()  # type: ignore[union-attr]
        await asyncio.gather(first, urgent, *flood)


async def test_closing_the_device_answers_everybody() -> None:
    async with Device() as device:
        engine = FakeEngine(base_s=0.05)
        slot = EngineSlot("double", device.close_engine)
        slot.swap(loaded(engine, model=config(max_batch=1)))
        calls = [asyncio.create_task(call(device, slot)) for _ in range(5)]
        await asyncio.sleep(0.01)
    answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
    assert not isinstance(answers[0], BaseException)  # it was running
    assert all(isinstance(answer, Unavailable) for answer in answers[1:])
    with pytest.raises(Unavailable, match="closed"):
        await call(device, slot)


async def test_room_is_kept_for_what_is_still_being_prepared() -> None:
    async with Device(max_queue_rows=4) as device:
        with device.preparing("double", 3, Context()):
            assert device.rows_ahead(Priority.INTERACTIVE) == 3
            with pytest.raises(Overloaded), device.preparing("double", 2, Context()):
                pass
        assert device.rows_ahead(Priority.INTERACTIVE) == 0


async def test_a_realtime_call_overtakes_a_flood_of_batch_calls(device: Device) -> None:
    engine = FakeEngine(base_s=0.01)
    slot = EngineSlot("double", device.close_engine)
    slot.swap(loaded(engine, model=config(max_batch=1)))
    flood = [asyncio.create_task(call(device, slot, priority=Priority.BATCH)) for _ in range(50)]
    await asyncio.sleep(0)
    await call(device, slot, priority=Priority.REALTIME)
    assert len(engine.batches) < 10  # of 51: it did not wait for the flood
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    assert device.scheduler.rows_ahead(Priority.OFFLINE) == 0
    assert math.isinf(device.scheduler.wake_at())


async def test_a_batch_predicted_to_be_short_runs_on_the_loop_and_a_longer_one_on_the_thread() -> None:
    async with Device(inline_below_s=0.001) as device:
        quick, slow = FakeEngine(), FakeEngine(base_s=0.005)
        one, other = slot_with(device, quick), slot_with(device, slow)
        np.testing.assert_array_equal(await call(device, one, x=3), np.full((1, 2), 6, np.float32))
        await call(device, other)
        assert quick.threads == {threading.get_ident()}
        assert slow.threads.isdisjoint(quick.threads)


async def test_what_arrives_while_the_thread_is_busy_is_not_run_inline() -> None:
    async with Device(inline_below_s=0.001) as device:
        held, quick = FakeEngine(base_s=0.002, gate=threading.Event()), FakeEngine()
        long = asyncio.create_task(call(device, slot_with(device, held)))
        await asyncio.sleep(0.01)
        short = asyncio.create_task(call(device, slot_with(device, quick)))
        await asyncio.sleep(0.01)
        assert quick.batches == []
        held.gate.set()  # type: ignore[union-attr]
        await asyncio.gather(long, short)
        assert threading.get_ident() not in held.threads | quick.threads


async def test_an_engine_that_fails_inline_fails_its_caller_and_gives_its_lease_back() -> None:
    async with Device(inline_below_s=0.001) as device:
        engine = FakeEngine(fail=lambda batch: ValueError("odd") if batch.items[0]["x"][0, 0] == 13 else None)
        slot = slot_with(device, engine)
        with pytest.raises(EngineError, match="odd"):
            await call(device, slot, x=13)
        await call(device, slot, x=1)
        slot.swap(None)
        await asyncio.sleep(0.05)
        assert engine.is_closed  # nobody holds it any more


async def test_an_engine_that_does_not_come_back_is_given_up_and_others_are_served() -> None:
    hung: list[str] = []
    engine, other = FakeEngine(gate=threading.Event()), FakeEngine(factor=3.0)
    async with Device(hang_after_s=0.1, on_hang=lambda loaded: hung.append(loaded.version)) as device:
        slot, beside = slot_with(device, engine), slot_with(device, other)
        start = time.monotonic()
        calls = [asyncio.create_task(call(device, slot)) for _ in range(4)]
        waiting = asyncio.create_task(call(device, beside))
        for one in calls:  # those that wait for the same engine are told too
            with pytest.raises(EngineError, match="has not come back"):
                await one
        assert 0.1 <= time.monotonic() - start < 5
        np.testing.assert_array_equal(await waiting, [[3.0, 3.0]])
        assert hung == ["1"]
        assert engine.batches == [1]
        slot.swap(None)
        assert not engine.is_closed  # it is still at work
        engine.gate.set()  # type: ignore[union-attr]
        async with asyncio.timeout(5):
            while not engine.is_closed:
                await asyncio.sleep(0.01)
        np.testing.assert_array_equal(await call(device, beside), [[3.0, 3.0]])
    assert len(other.threads) == 1
    assert not other.threads & engine.threads


async def test_a_batch_that_is_expected_to_take_long_does_not_hang() -> None:
    engine = FakeEngine(base_s=0.3)
    async with Device(hang_after_s=0.05) as device:
        slot = slot_with(device, engine)
        np.testing.assert_array_equal(await call(device, slot), [[2.0, 2.0]])


async def test_what_was_to_be_closed_behind_a_hanging_engine_is_closed() -> None:
    engine, old = FakeEngine(gate=threading.Event()), FakeEngine()
    async with Device(hang_after_s=0.1) as device:
        slot = slot_with(device, engine)
        hanging = asyncio.create_task(call(device, slot))
        await asyncio.sleep(0.02)
        device.close_engine(old)
        with pytest.raises(EngineError):
            await hanging
        async with asyncio.timeout(5):
            while not old.is_closed:
                await asyncio.sleep(0.01)
        engine.gate.set()  # type: ignore[union-attr]
