"""Events become Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from common.request import Priority, Reason
from common.telemetry.events import BatchDone, CacheFault, CacheLookup, EngineSwapped, RequestDone, TargetFailed
from common.telemetry.metrics import OTHER, Metrics

DONE = RequestDone(
    request_id="1", model="m", version="1", target="edge", reason=None, priority=Priority.BATCH, seconds=0.004
)


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """By name and label values, the labels in alphabetical order."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, *(s.labels[k] for k in sorted(s.labels))): s.value for f in families for s in f.samples}


def test_calls_are_counted_by_how_they_ended() -> None:
    metrics = Metrics()
    for event in (
        DONE,
        DONE,
        structs.replace(DONE, target="cloud", reason=Reason.OVERLOAD),
        structs.replace(DONE, error="InvalidInput"),
    ):
        metrics(event)
    got = samples(metrics)
    assert got["outrider_requests_total", "m", "", "ok", "edge"] == 2
    assert got["outrider_requests_total", "m", "overload", "ok", "cloud"] == 1
    assert got["outrider_requests_total", "m", "", "InvalidInput", "edge"] == 1
    assert got["outrider_request_seconds_count", "m", "edge"] == 2
    assert got["outrider_request_seconds_bucket", "0.0025", "m", "edge"] == 0
    assert got["outrider_request_seconds_bucket", "0.005", "m", "edge"] == 2


def test_the_rest_of_the_request_path_is_counted() -> None:
    metrics = Metrics()
    for event in (
        BatchDone(model="m", rows=8, items=3, seconds=0.5),
        CacheLookup(model="m", is_hit=True),
        CacheLookup(model="m", is_hit=False),
        CacheFault(problem="disk full"),
        EngineSwapped(model="m", old_version="1", new_version="2"),
        TargetFailed(request_id="1", model="m", target="cloud", error="gone"),
    ):
        metrics(event)
    got = samples(metrics)
    assert got["outrider_batch_rows_sum", "m"] == 8
    assert got["outrider_batch_seconds_sum", "m"] == 0.5
    assert got["outrider_cache_hits_total", "m"] == got["outrider_cache_misses_total", "m"] == 1
    assert got["outrider_cache_faults_total",] == 1
    assert got["outrider_engine_swaps_total", "m"] == 1
    assert got["outrider_target_failures_total", "m", "cloud"] == 1


def test_made_up_model_names_do_not_grow_the_registry() -> None:
    metrics = Metrics()
    for i in range(1000):
        metrics(structs.replace(DONE, model=f"made-up-{i}", error="ModelNotFound", target=""))
    metrics(structs.replace(DONE, model="real"))
    got = samples(metrics)
    assert got["outrider_requests_total", OTHER, "", "ModelNotFound", ""] == 1000 - 256
    assert got["outrider_requests_total", "real", "", "ok", "edge"] == 1
    assert sum(1 for key in got if key[0] == "outrider_requests_total") == 256 + 2


def test_a_label_has_at_most_255_characters() -> None:
    metrics = Metrics()
    for last in "ab":
        model = "m" * 100_000 + last
        metrics(structs.replace(DONE, model=model))
        metrics(structs.replace(DONE, model=model, error="NotFound"))
        metrics(CacheLookup(model=model, is_hit=True))
        metrics(BatchDone(model=model, rows=1, items=1, seconds=0.1))
    got = samples(metrics)
    assert got["outrider_requests_total", "m" * 255, "", "ok", "edge"] == 2
    assert got["outrider_batch_rows_count", "m" * 255] == 2
    assert max(len(label) for key in got for label in key) == 255


def test_other_packages_add_their_own_events() -> None:
    @dataclass(frozen=True)
    class Fetched:
        model: str
        size: int

    metrics = Metrics()
    count = metrics.counter("outrider_fetched_bytes_total", "Bytes fetched.", ("model",))
    depth = metrics.gauge("outrider_depth", "Depth.")
    metrics.register(Fetched, lambda event: count(event.size, event.model))
    metrics(Fetched("m", 100))
    metrics(Fetched("m", 20))
    depth(7)
    assert samples(metrics)["outrider_fetched_bytes_total", "m"] == 120
    assert samples(metrics)["outrider_depth",] == 7
    with pytest.raises(ValueError, match="Fetched"):
        metrics.register(Fetched, lambda event: None)


def test_events_that_nobody_registered_are_ignored() -> None:
    Metrics()(object())


def test_two_registries_do_not_meet() -> None:
    one, two = Metrics(), Metrics()
    one(DONE)
    assert ("outrider_requests_total", "m", "", "ok", "edge") not in samples(two)
