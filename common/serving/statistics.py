"""What the protocol's statistics extension counts, as a hook on the request path's events.

Owns the counts, per model and since the process started. A failed call and a batch name no version in their events, so
the counts of a model go over its versions. `Metrics` has the same events for Prometheus.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.clock import Clock, SystemClock
from common.telemetry.events import BatchDone, RequestDone

_MAX_STRANGERS = 1024  # names that have only failed: a caller may invent them
_UNKNOWN = frozenset({"ModelNotFound", "NotFound"})


@dataclass(slots=True)
class Durations:
    """How many, and how long together."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self.count += times
        self.seconds += times * seconds

    @property
    def ns(self) -> int:
        return round(self.seconds * 1e9)


@dataclass(slots=True)
class ModelStatistics:
    """Calls that ended (`success`, `fail`) and what this process's own engines ran for them: a call that another
    process or the cache answered is a success without an execution."""

    success: Durations = field(default_factory=Durations)
    fail: Durations = field(default_factory=Durations)
    compute: Durations = field(default_factory=Durations)  # per call: each one of a batch took as long as the batch
    batches: dict[int, Durations] = field(default_factory=dict)  # by rows
    last_inference_at: float | None = None  # monotonic seconds

    @property
    def inference_count(self) -> int:
        """Rows that were run."""
        return sum(rows * batches.count for rows, batches in self.batches.items())

    @property
    def execution_count(self) -> int:
        """Batches that were run."""
        return sum(batches.count for batches in self.batches.values())


class Statistics:
    """A hook; used on one event loop."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._models: dict[str, ModelStatistics] = {}

    def __call__(self, event: object) -> None:
        if isinstance(event, RequestDone):
            if event.error:
                self._failed(event)
            else:
                self._add(event.model).success.add(event.seconds)
        elif isinstance(event, BatchDone):
            model = self._add(event.model)
            model.compute.add(event.seconds, event.items)
            if (batches := model.batches.get(event.rows)) is None:
                batches = model.batches[event.rows] = Durations()
            batches.add(event.seconds)
            model.last_inference_at = self._clock.monotonic()

    def of(self, model: str) -> ModelStatistics:
        """All zero for a model that nobody has called."""
        return self._models.get(model) or ModelStatistics()

    def last_inference_ms(self, model: str) -> int:
        """Unix time in milliseconds by today's wall clock; 0 for never."""
        at = self.of(model).last_inference_at
        if at is None:
            return 0
        return round((self._clock.now().timestamp() - (self._clock.monotonic() - at)) * 1000)

    def _failed(self, event: RequestDone) -> None:
        if event.model in self._models or (event.error not in _UNKNOWN and len(self._models) < _MAX_STRANGERS):
            self._add(event.model).fail.add(event.seconds)

    def _add(self, model: str) -> ModelStatistics:
        if (counted := self._models.get(model)) is None:
            counted = self._models[model] = ModelStatistics()
        return counted
