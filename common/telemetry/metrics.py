"""Metrics from events, for Prometheus: the only importer of its client.

A `Metrics` object is a hook: hand it events and ask it for the text that `/metrics` answers. Other packages add their
own kinds of events with `register` and the counters that they make here.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.request import Reason
from common.telemetry.events import (
    BatchDone,
    CacheFault,
    CacheLookup,
    EngineHung,
    EngineSwapped,
    KindHook,
    RequestDone,
    TargetFailed,
)

M = TypeVar("M", bound=Collector)
_Family = type[CounterMetricFamily] | type[GaugeMetricFamily]
Measure = Callable[..., None]  # (value, *labels)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_MAX_UNSERVED = 256  # model names that only failed calls named: a stranger can make up any number of them
_MAX_LABEL = 255  # characters; a second guard behind the borders, which take no longer names
OTHER = "other"


class Metrics(KindHook):
    def __init__(self) -> None:
        super().__init__()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._served: set[str] = set()
        self._unserved: set[str] = set()
        self._register_serving()

    def counter(self, name: str, doc: str, labels: Sequence[str] = ()) -> Measure:
        """A counter to call as ``count(amount, *label_values)``."""
        return self._add(_Values(CounterMetricFamily, name, doc, labels)).add

    def gauge(self, name: str, doc: str, labels: Sequence[str] = ()) -> Measure:
        return self._add(_Values(GaugeMetricFamily, name, doc, labels)).set

    def histogram(self, name: str, doc: str, labels: Sequence[str], buckets: Sequence[float] = _SECONDS) -> Measure:
        return self._add(_Histogram(name, doc, labels, buckets)).observe

    def render(self) -> bytes:
        """The registry in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry)

    def _add(self, metric: M) -> M:
        self.registry.register(metric)
        return metric

    def _register_serving(self) -> None:
        self._register_calls()
        failures = self.counter("outrider_target_failures_total", "Targets that did not answer.", ("model", "target"))
        hits = self.counter("outrider_cache_hits_total", "Answers found in the cache.", ("model",))
        misses = self.counter("outrider_cache_misses_total", "Answers not found in the cache.", ("model",))
        faults = self.counter("outrider_cache_faults_total", "Reads and writes of the cache that failed.")
        swaps = self.counter("outrider_engine_swaps_total", "Changes of a model's engine.", ("model",))
        hangs = self.counter("outrider_engine_hangs_total", "Engines that did not come back.", ("model",))

        def looked_up(event: CacheLookup) -> None:
            (hits if event.is_hit else misses)(1, self._failed(event.model))

        self.register(TargetFailed, lambda event: failures(1, self._failed(event.model), event.target))
        self.register(CacheLookup, looked_up)
        self.register(CacheFault, lambda _: faults(1))
        self.register(EngineSwapped, lambda event: swaps(1, self._answered(event.model)))
        self.register(EngineHung, lambda event: hangs(1, self._answered(event.model)))

    def _register_calls(self) -> None:
        """What happens on every call: the places to count it are looked up once."""
        doc = "Calls by how they ended."
        requests = self._add(
            _Values(CounterMetricFamily, "outrider_requests_total", doc, ("model", "target", "reason", "status"))
        )
        seconds = self._add(
            _Histogram("outrider_request_seconds", "Seconds of answered calls.", ("model", "target"), _SECONDS)
        )
        rows = self._add(_Histogram("outrider_batch_rows", "Rows of each batch.", ("model",), _ROWS))
        doc = "Seconds of each batch on the engine."
        runs = self._add(_Histogram("outrider_batch_seconds", doc, ("model",), _SECONDS))
        answered: dict[tuple[str, str, Reason | None], tuple[_Cell, _Buckets]] = {}
        ran: dict[str, tuple[_Buckets, _Buckets]] = {}

        def request_done(event: RequestDone) -> None:
            reason = event.reason
            if event.error:
                requests.add(1, self._failed(event.model), event.target, reason or "", event.error)
                return
            key = (event.model, event.target, reason)
            if (cells := answered.get(key)) is None:
                model = self._answered(event.model)
                cells = answered[key] = (
                    requests.cell(model, event.target, reason.value if reason else "", "ok"),
                    seconds.cell(model, event.target),
                )
            cells[0].add(1)
            cells[1].observe(event.seconds)

        def batch_done(event: BatchDone) -> None:
            if (cells := ran.get(event.model)) is None:
                model = self._answered(event.model)
                cells = ran[event.model] = (rows.cell(model), runs.cell(model))
            cells[0].observe(event.rows)
            cells[1].observe(event.seconds)

        self.register(RequestDone, request_done)
        self.register(BatchDone, batch_done)

    def _answered(self, model: str) -> str:
        """The label of a model that was served here: always its own name."""
        self._served.add(model := _label(model))
        return model

    def _failed(self, model: str) -> str:
        """The label of a model that a call named, whether it exists or not: bounded, then `OTHER`."""
        model = _label(model)
        if model not in self._served and model not in self._unserved:
            if len(self._unserved) >= _MAX_UNSERVED:
                return OTHER
            self._unserved.add(model)
        return model


def _label(text: str) -> str:
    return text if len(text) <= _MAX_LABEL else text[:_MAX_LABEL]


class _Cell:
    """One value of a counter or a gauge."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self._lock, self.value = threading.Lock(), 0.0

    def add(self, amount: float) -> None:
        with self._lock:
            self.value += amount

    def set(self, value: float) -> None:
        self.value = value


class _Values(Collector):
    """A counter or a gauge by its labels. Counting is an addition; Prometheus' objects are made when it asks."""

    def __init__(self, family: _Family, name: str, doc: str, labels: Sequence[str]) -> None:
        self._family, self._name, self._doc, self._labels = family, name, doc, tuple(labels)
        self._cells: dict[tuple[str, ...], _Cell] = {}
        if not labels:
            self.cell()

    def cell(self, *labels: str) -> _Cell:
        return self._cells.get(labels) or self._cells.setdefault(tuple(map(_label, labels)), _Cell())

    def add(self, amount: float, *labels: str) -> None:
        self.cell(*labels).add(amount)

    def set(self, value: float, *labels: str) -> None:
        self.cell(*labels).set(value)

    def collect(self) -> Iterable[Metric]:
        family = self._family(self._name, self._doc, labels=self._labels)
        for labels, cell in list(self._cells.items()):
            family.add_metric(labels, cell.value)
        return [family]


class _Buckets:
    """Counts per bucket (each with its upper bound, the last without one) and the sum."""

    __slots__ = ("_bounds", "_counts", "_lock", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._lock, self._bounds = threading.Lock(), bounds
        self._counts, self._total = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._total += value

    def read(self) -> tuple[list[int], float]:
        """Counts of values up to each bound, and the sum."""
        with self._lock:
            return list(accumulate(self._counts)), self._total


class _Histogram(Collector):
    def __init__(self, name: str, doc: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name, self._doc, self._labels, self._bounds = name, doc, tuple(labels), tuple(bounds)
        self._cells: dict[tuple[str, ...], _Buckets] = {}

    def cell(self, *labels: str) -> _Buckets:
        return self._cells.get(labels) or self._cells.setdefault(tuple(map(_label, labels)), _Buckets(self._bounds))

    def observe(self, value: float, *labels: str) -> None:
        self.cell(*labels).observe(value)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._doc, labels=self._labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, cell in list(self._cells.items()):
            counts, total = cell.read()
            family.add_metric(labels, list(zip(bounds, counts, strict=True)), total)
        return [family]
