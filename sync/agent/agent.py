"""The agent's lifetime: one thread that polls, believes what is proven and takes each model a step further.

A hint only moves the next poll forward. Errors of one model stay with that model; errors of the service are retried
with backoff, and whatever serves goes on serving.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from common.clock import Clock, SystemClock
from common.errors import OutriderError
from sync.agent.client import GrpcSource
from sync.agent.journal import Journal
from sync.agent.ports import Installer, Source
from sync.agent.schedule import PollSchedule
from sync.agent.states import Record
from sync.agent.steps import Steps
from sync.events import Event, Hook, PollDone, SyncFailed, ignore
from sync.hints import Hint
from sync.store import folder_lock
from sync.trust.rules import raise_floors
from sync.trust.verifier import Verifier, View

logger = logging.getLogger(__name__)
EVERY_MODEL = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Where an agent keeps its state, whom it asks and what it takes."""

    folder: Path  # journal, models, staging, metadata cache: one agent per folder
    root: Path  # the first root.json, brought here by a trusted way
    source: str  # host:port of the sync service
    models: tuple[str, ...] = (EVERY_MODEL,)
    engines: tuple[str, ...] = ("onnxruntime",)  # in order of preference
    interval_s: float = 900.0
    min_gap_s: float = 1.0  # between two polls, whatever hints say
    timeout_s: float = 60.0  # of one call


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """Where one model stands: `version`, `digest` and `reason` belong to `state`, `active` is what serves."""

    model: str
    state: str
    version: str | None
    digest: str | None
    epoch: int | None  # of the desired state last believed
    active: str | None
    previous: str | None
    reason: str
    next_try_s: float  # from now
    counters: Mapping[str, int]  # bytes_<form>, slabs_fetched, slabs_reused, fallbacks: since the journal began


class Agent:
    """Use `start` and `stop`, or `restore`, `run_once` and `close` without the thread."""

    def __init__(
        self,
        config: AgentConfig,
        installer: Installer,
        *,
        on_event: Hook = ignore,
        source: Source | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Opens the folder. Raises `StoreBusy` when another agent has it."""
        self.config, self._hook = config, on_event
        self._clock = clock or SystemClock()
        self._schedule = PollSchedule(config.interval_s, config.min_gap_s, rng or random.Random())
        self._wakeup, self._is_stopping = threading.Condition(), False
        self._thread: threading.Thread | None = None
        self._restored = threading.Event()
        self.last_error: str | None = None
        config.folder.mkdir(parents=True, exist_ok=True)
        root = config.root.read_bytes()
        with contextlib.ExitStack() as stack:
            stack.enter_context(folder_lock(config.folder / "lock", 0.0))
            self._journal = Journal(config.folder / "journal.db")
            stack.callback(self._journal.close)
            self._source = source or GrpcSource(config.source, timeout_s=config.timeout_s)
            stack.callback(self._source.close)
            self._stack = stack.pop_all()
        self._timestamp_seen = self._journal.floors().get("timestamp", 0)
        self._verifier = Verifier(config.folder / "tuf", root, self._source.read, self._clock)
        self._steps = Steps(config.folder, self._journal, installer, self._source, config.engines, self._emit)

    # --- lifetime ---

    def start(self) -> None:
        """Restores what is on the disk and begins to poll, in a thread of the agent's own."""
        self._thread = threading.Thread(target=self._run, name="sync-agent", daemon=True)
        self._thread.start()

    def wait_restored(self, timeout_s: float) -> bool:
        """True once everything that was committed has been handed to the installer."""
        return self._restored.wait(timeout_s)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after its current step (a running call is broken off) and closes the folder."""
        with self._wakeup:
            self._is_stopping = True
            self._wakeup.notify_all()
        if self._thread is not None:
            self._source.close()
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("the sync agent is still busy after %g s; it ends with the process", timeout_s)
                return
        self.close()

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    # --- from any thread ---

    def wake(self, spread_s: float = 0.0) -> None:
        """Polls early, somewhere within `spread_s` seconds; never sooner after the last poll than `min_gap_s`."""
        with self._wakeup:
            self._schedule.hint(self._clock.monotonic(), spread_s)
            self._wakeup.notify_all()

    def hint(self, hint: Hint) -> None:
        """An unverified rumour that there is new metadata: ignored when it speaks of what was seen already and done."""
        if hint.timestamp_version > self._timestamp_seen or self._schedule.is_behind:
            self.wake(hint.spread_ms / 1000)

    def status(self) -> tuple[ModelStatus, ...]:
        """Each model of interest, those that nothing is known of yet included. Reads the disk."""
        records = {record.model: record for record in self._journal.records()}
        for model in self.config.models:
            if model != EVERY_MODEL:
                records.setdefault(model, Record(model=model))
        next_try_s = max(0.0, self._schedule.next_at - self._clock.monotonic())
        return tuple(self._status(record, next_try_s) for record in records.values())

    def _status(self, record: Record, next_try_s: float) -> ModelStatus:
        return ModelStatus(
            model=record.model,
            state=record.state,
            version=record.version,
            digest=record.digest,
            epoch=None if record.desired is None else record.desired.epoch,
            active=record.active,
            previous=record.previous,
            reason=record.reason,
            next_try_s=next_try_s,
            counters=self._journal.counters(record.model),
        )

    # --- in the agent's thread ---

    def restore(self) -> None:
        """Serves what was committed, from the disk alone."""
        for record in self._journal.records():
            if self._is_mine(record.model):
                try:
                    self._steps.restore(record)
                except Exception:
                    logger.exception("model %s is not restored; the next poll tries again", record.model)
        self._restored.set()

    def run_once(self) -> bool:
        """One poll and everything that follows from it. False when something has to be tried again."""
        started = self._clock.monotonic()
        with self._wakeup:
            self._schedule.begin()
        try:
            view = self._verifier.refresh()
            floors = raise_floors(self._journal.floors(), view.versions())
            self._journal.save_floors(floors)
            self._timestamp_seen = floors["timestamp"]
            self.last_error = None
        except OutriderError as exc:
            self.last_error = str(exc)
        except OSError as exc:
            self.last_error = f"{exc.filename or self.config.folder}: {exc.strerror or exc}"
        self._emit(PollDone(error=self.last_error, seconds=self._clock.monotonic() - started))
        is_ok = self.last_error is None and self._advance_all(view)
        with self._wakeup:
            self._schedule.done(self._clock.monotonic(), is_ok=is_ok)
        return is_ok

    def _advance_all(self, view: View) -> bool:
        done = [self._advance(view, model) for model in view.models() if self._is_mine(model)]
        view.prune()
        return all(done)

    def _is_mine(self, model: str) -> bool:
        return model in self.config.models or EVERY_MODEL in self.config.models

    def _advance(self, view: View, model: str) -> bool:
        try:
            desired = view.desired(model)
            if desired is not None:
                self._steps.advance(desired, view.manifest)
            return True
        except Exception as exc:
            logger.warning("model %s is not brought up to date now: %s", model, exc)
            self._emit(SyncFailed(model=model, error=str(exc)))
            return False

    def _run(self) -> None:
        self._guarded(self.restore)
        self._restored.set()
        while self._wait():
            self._guarded(self.run_once)

    def _wait(self) -> bool:
        """Sleeps until the next poll is due; False when the agent is to stop."""
        with self._wakeup:
            while not self._is_stopping:
                left = self._schedule.next_at - self._clock.monotonic()
                if left <= 0:
                    return True
                self._wakeup.wait(left)
            return False

    def _guarded(self, step: Callable[[], object]) -> None:
        """Nothing that one round meets (a full disk, a bug) may end the agent."""
        try:
            step()
        except Exception:
            logger.exception("the sync agent's round failed; it is tried again")
            with self._wakeup:
                self._schedule.done(self._clock.monotonic(), is_ok=False)

    def _emit(self, event: Event) -> None:
        """A hook's own failure is not the agent's."""
        try:
            self._hook(event)
        except Exception:
            logger.exception("an event hook failed on %s", type(event).__name__)
