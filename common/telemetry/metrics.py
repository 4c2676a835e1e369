"""Metrics from events, for Prometheus: the only importer of its client.

A `Metrics` object is a hook: hand it events and ask it for the text that `/metrics` answers. Other packages add their
own kinds of events with `register` and the counters that they make here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from common.telemetry.events import BatchDone, CacheFault, CacheLookup, EngineSwapped, RequestDone, TargetFailed

E = TypeVar("E")
Measure = Callable[..., None]  # (value, *labels)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_MAX_UNSERVED = 256  # model names that only failed calls named: a stranger can make up any number of them
OTHER = "other"


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._on: dict[type, Callable[[Any], None]] = {}
        self._served: set[str] = set()
        self._unserved: set[str] = set()
        self._register_serving()

    def __call__(self, event: object) -> None:
        """The hook. Kinds of events that nobody registered are ignored."""
        if (fn := self._on.get(type(event))) is not None:
            fn(event)

    def register(self, kind: type[E], fn: Callable[[E], None]) -> None:
        """`fn` measures each event of the class `kind`; one function a kind."""
        if kind in self._on:
            raise ValueError(f"events of kind {kind.__name__} are measured already")
        self._on[kind] = fn

    def counter(self, name: str, doc: str, labels: Sequence[str] = ()) -> Measure:
        """A counter to call as ``count(amount, *label_values)``."""
        return _bound(Counter(name, doc, labels, registry=self.registry), "inc")

    def gauge(self, name: str, doc: str, labels: Sequence[str] = ()) -> Measure:
        return _bound(Gauge(name, doc, labels, registry=self.registry), "set")

    def histogram(self, name: str, doc: str, labels: Sequence[str], buckets: Sequence[float] = _SECONDS) -> Measure:
        return _bound(Histogram(name, doc, labels, registry=self.registry, buckets=buckets), "observe")

    def render(self) -> bytes:
        """The registry in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry)

    def _register_serving(self) -> None:
        requests = self.counter(
            "outrider_requests_total", "Calls by how they ended.", ("model", "target", "reason", "status")
        )
        seconds = self.histogram("outrider_request_seconds", "Seconds of answered calls.", ("model", "target"))
        failures = self.counter("outrider_target_failures_total", "Targets that did not answer.", ("model", "target"))
        rows = self.histogram("outrider_batch_rows", "Rows of each batch.", ("model",), _ROWS)
        runs = self.histogram("outrider_batch_seconds", "Seconds of each batch on the engine.", ("model",))
        hits = self.counter("outrider_cache_hits_total", "Answers found in the cache.", ("model",))
        misses = self.counter("outrider_cache_misses_total", "Answers not found in the cache.", ("model",))
        faults = self.counter("outrider_cache_faults_total", "Reads and writes of the cache that failed.")
        swaps = self.counter("outrider_engine_swaps_total", "Changes of a model's engine.", ("model",))

        def request_done(event: RequestDone) -> None:
            model = self._failed(event.model) if event.error else self._answered(event.model)
            requests(1, model, event.target, event.reason.value if event.reason else "", event.error or "ok")
            if not event.error:
                seconds(event.seconds, model, event.target)

        def batch_done(event: BatchDone) -> None:
            rows(event.rows, self._answered(event.model))
            runs(event.seconds, event.model)

        def looked_up(event: CacheLookup) -> None:
            (hits if event.is_hit else misses)(1, self._failed(event.model))

        self.register(RequestDone, request_done)
        self.register(TargetFailed, lambda event: failures(1, self._failed(event.model), event.target))
        self.register(BatchDone, batch_done)
        self.register(CacheLookup, looked_up)
        self.register(CacheFault, lambda _: faults(1))
        self.register(EngineSwapped, lambda event: swaps(1, self._answered(event.model)))

    def _answered(self, model: str) -> str:
        """The label of a model that was served here: always its own name."""
        self._served.add(model)
        return model

    def _failed(self, model: str) -> str:
        """The label of a model that a call named, whether it exists or not: bounded, then `OTHER`."""
        if model not in self._served and model not in self._unserved:
            if len(self._unserved) >= _MAX_UNSERVED:
                return OTHER
            self._unserved.add(model)
        return model


def _bound(metric: Any, method: str) -> Measure:
    """Calls to the metric's children by label values; each child is looked up once."""
    children: dict[tuple[str, ...], Callable[[float], None]] = {}

    def measure(value: float, *labels: str) -> None:
        if (child := children.get(labels)) is None:
            child = children[labels] = getattr(metric.labels(*labels) if labels else metric, method)
        child(value)

    return measure
