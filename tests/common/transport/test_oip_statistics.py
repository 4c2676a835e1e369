"""What is counted, and what a caller cannot make it count."""

from __future__ import annotations

from common.request import Priority
from common.serving import statistics as counted
from common.serving.statistics import Statistics
from common.telemetry.events import BatchDone, RequestDone
from common.transport.oip_statistics import read
from tests.common.transport.fakes import FakeCatalog


def done(model: str, seconds: float, error: str = "") -> RequestDone:
    return RequestDone(
        request_id="r",
        model=model,
        version="" if error else "3",
        target="" if error else "edge",
        reason=None,
        priority=Priority.INTERACTIVE,
        seconds=seconds,
        error=error,
    )


def test_calls_and_batches_are_counted_apart() -> None:
    statistics = Statistics()
    for event in (
        done("m", 0.5),
        done("m", 0.25),
        done("m", 0.125, "EngineError"),
        BatchDone(model="m", rows=4, items=2, seconds=0.0625),
        BatchDone(model="m", rows=4, items=1, seconds=0.0625),
        BatchDone(model="m", rows=1, items=1, seconds=0.0625),
    ):
        statistics(event)
    model = statistics.of("m")
    assert (model.success.count, model.success.ns) == (2, 750_000_000)
    assert (model.fail.count, model.fail.ns) == (1, 125_000_000)
    assert (model.inference_count, model.execution_count) == (9, 3)
    assert (model.compute.count, model.compute.ns) == (4, 250_000_000)
    assert statistics.last_inference_ms("m") > 1_600_000_000_000


def test_invented_names_do_not_fill_the_memory() -> None:
    statistics = Statistics()
    statistics(done("real", 0.1))
    for i in range(2 * counted._MAX_STRANGERS):
        statistics(done(f"unknown-{i}", 0.1, "ModelNotFound"))
        statistics(done(f"late-{i}", 0.1, "DeadlineExceeded"))
    statistics(done("real", 0.1, "DeadlineExceeded"))
    statistics(done("another", 0.1))
    assert len(statistics._models) <= counted._MAX_STRANGERS + 2
    assert (statistics.of("real").fail.count, statistics.of("another").success.count) == (1, 1)


async def test_ready_model_that_nobody_called_has_zeros() -> None:
    entries = await read(FakeCatalog(), Statistics(), "", None)
    assert [(e["name"], e["version"], e["inference_count"]) for e in entries] == [("double", "3", 0), ("echo", "3", 0)]
