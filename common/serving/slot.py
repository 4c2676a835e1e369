"""The one place where an engine changes: `EngineSlot.swap`.

A request pins the engine that is current when it is queued; the old engine is closed when the last request that pinned
it is done. Safe to call from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from common.bundle import ModelConfig
from common.errors import EngineError
from common.serving.accepts import Accepts
from common.serving.engine import Engine
from common.serving.latency import LatencyModel
from common.serving.vitals import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """An engine that is warm, with all that belongs to its version: config, labels, measured latency."""

    engine: Engine
    config: ModelConfig
    version: str
    labels: tuple[str, ...]
    latency: LatencyModel
    identity: str = ""  # digest of the files that answer: a version's name may be used again for others
    tally: Tally = field(default_factory=Tally, compare=False)
    accepts: Accepts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "accepts", Accepts(self.config))


class Lease:
    """One request's hold on one engine. `release` exactly once; the engine stays open until then."""

    __slots__ = ("_slot", "loaded")

    def __init__(self, slot: EngineSlot, loaded: LoadedEngine) -> None:
        self._slot, self.loaded = slot, loaded

    def release(self) -> None:
        self._slot._release(self.loaded)


class EngineSlot:
    """The current engine of one model. `close_engine` gets every engine that is no longer used, once."""

    def __init__(self, model: str, close_engine: Callable[[Engine], None]) -> None:
        self.model = model
        self._close = close_engine
        self._lock = threading.Lock()
        self._current: LoadedEngine | None = None
        self._leases: dict[int, int] = {}  # id of a loaded engine -> requests that hold it

    @property
    def current(self) -> LoadedEngine | None:
        return self._current

    def acquire(self) -> Lease | None:
        """Pins the current engine, or None where there is none."""
        with self._lock:
            if self._current is None:
                return None
            self._leases[id(self._current)] += 1
            return Lease(self, self._current)

    def swap(self, new: LoadedEngine | None) -> LoadedEngine | None:
        """Makes `new` the engine of all requests queued from now on (None: unload). Returns the one before. An engine
        that served before may come back as long as somebody has a lease on it."""
        with self._lock:
            old, self._current = self._current, new
            if new is not None:
                self._leases.setdefault(id(new), 0)
            is_idle = old is not None and self._leases[id(old)] == 0
            if is_idle:
                del self._leases[id(old)]
        if is_idle and old is not None:
            self._close(old.engine)
        return old

    def _release(self, loaded: LoadedEngine) -> None:
        with self._lock:
            left = self._leases[id(loaded)] - 1
            if left < 0:
                raise EngineError(self.model, "a lease was released twice")
            self._leases[id(loaded)] = left
            is_last = left == 0 and loaded is not self._current
            if is_last:
                del self._leases[id(loaded)]
        if is_last:
            self._close(loaded.engine)
