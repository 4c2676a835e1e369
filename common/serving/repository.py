"""The models of this process: which are installed, which have an engine up, and what state each is in.

Owns the slots and load/unload. Leaves opening engines to the opener that is handed in, and deciding what should be
installed to the parameter path. Safe to call from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.bundle import ModelConfig
from common.errors import ModelNotFound, ModelNotReady, OutriderError, VersionNotFound
from common.serving.catalog import ModelMetadata, ModelState, ModelStatus
from common.serving.engine import Engine
from common.serving.slot import EngineSlot, Lease, LoadedEngine
from common.serving.target import Readiness
from common.telemetry.events import EngineSwapped, Hook, ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A version on this machine's disk: a bundle folder, and what of it is run by which engine."""

    model: str
    version: str
    folder: Path
    variant: str
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An engine that serves, or served, and stays open until `lease` is released."""

    lease: Lease
    installed: Installed


Opener = Callable[[Installed], LoadedEngine]
_HANGS_AGAIN_S = 600.0


@dataclass(slots=True)
class _Entry:
    slot: EngineSlot
    installed: Installed | None = None
    is_wanted: bool = True  # an operator's unload makes it False: a new version is then installed but not opened
    building: str = ""  # what is being built, empty when nothing is
    problem: str = ""  # why there is no engine
    config: ModelConfig | None = None  # of the version that was opened last
    hung_at: float = -math.inf  # monotonic time of the last engine that did not come back
    guard: threading.RLock = field(default_factory=threading.RLock)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


class Repository:
    """Implements `Catalog` for the models of this process."""

    def __init__(self, opener: Opener, close_engine: Callable[[Engine], None], *, on_event: Hook = ignore) -> None:
        self._open, self._close, self._on_event = opener, close_engine, on_event
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    # --- the request path ---

    def lease(self, model: str, version: str | None = None) -> Lease:
        """Pins the current engine. Raises `ModelNotFound`, `ModelNotReady`, or `VersionNotFound` for another pin."""
        entry = self._entry(model)
        lease = entry.slot.acquire()
        if lease is None:
            raise ModelNotReady(model, entry.building or entry.problem or "unloaded")
        if version not in (None, lease.loaded.version):
            lease.release()
            raise VersionNotFound(model, str(version), [lease.loaded.version])
        return lease

    def current(self, model: str) -> LoadedEngine | None:
        entry = self._entries.get(model)
        return entry.slot.current if entry else None

    def config(self, model: str) -> ModelConfig | None:
        """Of the version that serves, or served last; None for a model that never had an engine here."""
        entry = self._entries.get(model)
        return entry.config if entry else None

    def readiness(self, model: str, version: str | None = None) -> Readiness:
        entry = self._entries.get(model)
        if entry is None:
            return Readiness.ABSENT
        loaded = entry.slot.current
        if loaded is not None:
            return Readiness.READY if version in (None, loaded.version) else Readiness.ABSENT
        return Readiness.BUILDING if entry.building else Readiness.ABSENT

    def models(self) -> tuple[str, ...]:
        return tuple(self._entries)

    # --- the parameter path ---

    def start_building(self, model: str, what: str) -> None:
        self._ensure(model).building = what

    def stop_building(self, model: str, problem: str = "") -> None:
        entry = self._ensure(model)
        entry.building, entry.problem = "", problem

    def activate(self, loaded: LoadedEngine, installed: Installed) -> None:
        """Makes a warm engine the one that answers; the old one closes when its last request is done."""
        entry = self._ensure(installed.model)
        with entry.guard:
            entry.installed, entry.config = installed, loaded.config
            entry.building = entry.problem = ""
            if entry.is_wanted:
                self._swap(entry, loaded)
            else:
                self._close(loaded.engine)

    def hold(self, model: str) -> Held | None:
        """The engine that serves now, kept open until it is let go; None where none serves."""
        entry = self._entries.get(model)
        if entry is None:
            return None
        with entry.guard:
            lease, installed = entry.slot.acquire(), entry.installed
        return None if lease is None or installed is None else Held(lease=lease, installed=installed)

    def revert(self, held: Held) -> None:
        """Makes an engine that was held the one that answers again."""
        entry = self._ensure(held.installed.model)
        with entry.guard:
            entry.installed, entry.config = held.installed, held.lease.loaded.config
            entry.building = entry.problem = ""
            if entry.is_wanted:
                self._swap(entry, held.lease.loaded)

    def give_up(self, hung: LoadedEngine) -> Coroutine[Any, Any, None] | None:
        """An engine that does not come back is asked nothing more, from now on. What is returned opens it anew; None
        the second time within ten minutes: whoever loads it again, or releases another version, decides."""
        entry = next((one for one in self._entries.values() if one.slot.current is hung), None)
        if entry is None:  # replaced meanwhile
            return None
        with entry.guard:
            self._swap(entry, None)
        before, entry.hung_at = entry.hung_at, time.monotonic()
        entry.problem = f"the engine of version {hung.version} did not come back"
        if entry.hung_at - before < _HANGS_AGAIN_S:
            entry.problem += ", again"
            return None
        return self._reopen(entry)

    async def _reopen(self, entry: _Entry) -> None:
        async with entry.loading:
            if entry.slot.current is None and entry.is_wanted and entry.installed is not None:
                with contextlib.suppress(OutriderError):  # it is the entry's problem now
                    await asyncio.to_thread(self._load, entry.slot.model, entry)

    def withdraw(self, model: str, problem: str) -> None:
        """Takes the engine away, and what was installed: until something else is activated there is none here."""
        entry = self._ensure(model)
        with entry.guard:
            entry.installed, entry.building, entry.problem = None, "", problem
            self._swap(entry, None)

    def close(self) -> None:
        for entry in self._entries.values():
            entry.slot.swap(None)

    # --- Catalog ---

    async def metadata(self, model: str, version: str | None) -> ModelMetadata:
        loaded = self._current(model, version)
        config: ModelConfig = loaded.config
        return ModelMetadata(
            name=model,
            versions=(loaded.version,),
            platform=loaded.engine.fingerprint.platform,
            inputs=config.inputs,
            outputs=config.outputs,
            max_batch=config.max_batch,
        )

    async def is_model_ready(self, model: str, version: str | None) -> bool:
        loaded = self._entry(model).slot.current
        return loaded is not None and version in (None, loaded.version)

    async def index(self) -> list[ModelStatus]:
        return [self._status(name, entry) for name, entry in sorted(self._entries.items())]

    async def load(self, model: str) -> None:
        """Opens the installed version again, off the event loop. Does nothing where an engine is up."""
        entry = self._entry(model)
        entry.is_wanted = True
        async with entry.loading:
            if entry.slot.current is None:
                # a caller that leaves must not leave an engine behind that nobody closes
                await asyncio.shield(asyncio.to_thread(self._load, model, entry))

    async def unload(self, model: str) -> None:
        """Takes the engine away; requests that have pinned it still get their answers."""
        entry = self._entry(model)
        with entry.guard:
            entry.is_wanted = False
            self._swap(entry, None)

    def _load(self, model: str, entry: _Entry) -> None:
        installed = entry.installed
        if installed is None:
            raise ModelNotReady(model, entry.problem or "nothing is installed yet")
        entry.building = "loading"
        try:
            loaded = self._open(installed)
        except OutriderError as exc:
            entry.problem = str(exc)
            raise
        finally:
            entry.building = ""
        with entry.guard:
            if entry.is_wanted and entry.slot.current is None and entry.installed is installed:
                entry.problem = ""
                self._swap(entry, loaded)
            else:  # a push was faster, or an unload came after
                self._close(loaded.engine)

    def _swap(self, entry: _Entry, loaded: LoadedEngine | None) -> None:
        """Holds the entry's guard: what is decided on and what is done are one."""
        old = entry.slot.swap(loaded)
        if old is None and loaded is None:
            return
        self._on_event(
            EngineSwapped(
                model=entry.slot.model,
                old_version=old.version if old else "",
                new_version=loaded.version if loaded else "",
            )
        )

    def _current(self, model: str, version: str | None) -> LoadedEngine:
        entry = self._entry(model)
        loaded = entry.slot.current
        if loaded is None:
            raise ModelNotReady(model, entry.building or entry.problem or "unloaded")
        if version not in (None, loaded.version):
            raise VersionNotFound(model, str(version), [loaded.version])
        return loaded

    def _entry(self, model: str) -> _Entry:
        try:
            return self._entries[model]
        except KeyError:
            raise ModelNotFound(model, self._entries) from None

    def _ensure(self, model: str) -> _Entry:
        with self._lock:
            if model not in self._entries:
                self._entries[model] = _Entry(EngineSlot(model, self._close))
            return self._entries[model]

    def _status(self, name: str, entry: _Entry) -> ModelStatus:
        loaded = entry.slot.current
        if loaded is not None:
            return ModelStatus(name=name, version=loaded.version, state=ModelState.READY)
        version = entry.installed.version if entry.installed else ""
        if entry.building:
            return ModelStatus(name=name, version=version, state=ModelState.BUILDING, reason=entry.building)
        return ModelStatus(name=name, version=version, state=ModelState.UNAVAILABLE, reason=entry.problem or "unloaded")
