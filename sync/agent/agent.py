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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from common.clock import Clock, SystemClock
from common.errors import FolderUnusable, OutriderError
from sync.agent.folders import make_folder
from sync.agent.journal import Journal, Release
from sync.agent.ports import Installer, Source
from sync.agent.probation import ProbationLimits
from sync.agent.reasons import code_of
from sync.agent.reports import NoReports, Reporter
from sync.agent.schedule import PollSchedule
from sync.agent.sources import source_of
from sync.agent.states import Code, Record, State
from sync.agent.steps import StepOptions, Steps
from sync.agent.watch import LOOK_S, Watch
from sync.agent.window import Window
from sync.disk import folder_lock
from sync.events import Event, Hook, PollDone, SyncFailed, ignore
from sync.hints import Hint
from sync.trust.rules import raise_floors
from sync.trust.time import raise_time
from sync.trust.verifier import Verifier, View

if TYPE_CHECKING:
    from sync.pki.identity import Identity

logger = logging.getLogger(__name__)
EVERY_MODEL = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Where an agent keeps its state, whom it asks and what it takes."""

    folder: Path  # journal, models, staging, metadata cache: one agent per folder
    root: Path  # the first root.json, brought here by a trusted way
    source: str  # host:port of the sync service, or where a store lies: http://, https://, s3://bucket/prefix
    models: tuple[str, ...] = (EVERY_MODEL,)
    engines: tuple[str, ...] = ("onnxruntime",)  # in order of preference
    interval_s: float = 900.0
    min_gap_s: float = 1.0  # between two polls, whatever hints say
    timeout_s: float = 60.0  # of one call
    identity: Identity | None = None  # shown to a service that speaks TLS; None: plain
    window: Window | None = None  # in which may be fetched and installed; None: always
    rate_bytes_s: float | None = None  # of what is read from a sync service; None: no limit
    peers: tuple[str, ...] = ()  # host:port of nodes nearby, asked for slabs first
    probation: ProbationLimits = field(default_factory=ProbationLimits)
    build_timeout_s: float = 1800.0  # of preparing an engine, and of gating it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """Where one model stands: `version`, `digest` and `reason` belong to `state`, `active` is what serves."""

    model: str
    state: str
    code: str  # why it is there (`states.Code`)
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
        reporter: Reporter | None = None,
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
        self._failed: dict[str, tuple[Code, str]] = {}  # of the last round, by model: the journal may not take it
        if not (config.folder / "journal.db").exists():
            make_folder(config.folder)
        root = config.root.read_bytes()
        with contextlib.ExitStack() as stack:
            stack.enter_context(folder_lock(config.folder / "lock", 0.0))
            self._journal = Journal(config.folder / "journal.db", now=lambda: self._clock.now().timestamp())
            stack.callback(self._journal.close)
            self._source = source or source_of(
                config.source,
                timeout_s=config.timeout_s,
                identity=config.identity,
                rate_bytes_s=config.rate_bytes_s,
            )
            stack.callback(self._source.close)
            self._stack = stack.pop_all()
        self._timestamp_seen = self._journal.floors().get("timestamp", 0)
        self._verifier = Verifier(config.folder / "tuf", root, self._source.read, self._clock)
        self._reporter = reporter or NoReports()
        self._stack.callback(self._reporter.close)
        self._looks_at: float | None = None  # monotonic time of the next look at what is on probation
        options = StepOptions(
            engines=config.engines,
            window=config.window,
            probation_s=config.probation.seconds,
            peers=config.peers,
            build_timeout_s=config.build_timeout_s,
        )
        now = self._clock.now
        self._steps = Steps(
            config.folder,
            self._journal,
            installer,
            self._source,
            options,
            self._emit,
            now,
            cancelled=lambda: self._is_stopping,
        )
        self._watch = Watch(self._journal, installer, self._steps, config.probation, self._emit, now)

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
        code, reason = record.code, record.reason
        failed = self._failed.get(record.model)
        if failed is not None and failed[0] is not code:
            code, reason = failed
        return ModelStatus(
            model=record.model,
            state=record.state,
            code=code,
            version=record.version,
            digest=record.digest,
            epoch=None if record.desired is None else record.desired.epoch,
            active=record.active,
            previous=record.previous,
            reason=reason,
            next_try_s=next_try_s,
            counters=self._journal.counters(record.model),
        )

    def installed(self) -> list[tuple[Release, Path]]:
        """What this node could give to its peers: releases, and where their files are."""
        return self._steps.installed()

    # --- in the agent's thread ---

    def restore(self) -> None:
        """Serves what was committed, from the disk alone."""
        for record in self._journal.records():
            if self._is_mine(record.model):
                try:
                    self._steps.restore(self._watch.restore(record))
                    self._watch.after_restore(self._journal.record(record.model))
                except Exception:
                    logger.exception("model %s is not restored; the next poll tries again", record.model)
        self._plan_look()
        self._restored.set()

    def look(self) -> None:
        """Judges what is on probation. When that has ended, something newer may be waiting for it."""
        self._looks_at = None
        if not self._watch.look():
            self._reporter.report(self.status(), self.last_error)
            with self._wakeup:
                self._schedule.hint(self._clock.monotonic(), 0.0)
        self._plan_look()

    def _plan_look(self) -> None:
        is_watching = any(one.state in (State.PROBATION, State.ROLLING_BACK) for one in self._journal.records())
        at = self._clock.monotonic() + LOOK_S
        self._looks_at = min(at, self._looks_at or at) if is_watching else None

    def run_once(self) -> bool:
        """One poll and everything that follows from it. False when something has to be tried again."""
        started = self._clock.monotonic()
        with self._wakeup:
            self._schedule.begin()
        try:
            floor = self._journal.time_floor()
            view = self._verifier.refresh(floor)
            floors = raise_floors(self._journal.floors(), view.versions())
            with self._journal.transaction():
                self._journal.save_floors(floors)
                self._journal.save_time_floor(raise_time(floor, view.signed_at()))
            self._timestamp_seen = floors["timestamp"]
            self.last_error = None
        except OutriderError as exc:
            self.last_error = str(exc)
        except OSError as exc:
            self.last_error = f"{exc.filename or self.config.folder}: {exc.strerror or exc}"
        with contextlib.suppress(FolderUnusable):  # a full disk: a poll is no less of a poll
            self._journal.save_poll(self.last_error or "")
        self._emit(PollDone(error=self.last_error, seconds=self._clock.monotonic() - started))
        is_ok = self.last_error is None and self._advance_all(view)
        with self._wakeup:
            self._schedule.done(self._clock.monotonic(), is_ok=is_ok)
            for record in self._journal.records():
                if record.state is State.WAITING and record.not_before is not None:
                    wait_s = max(0.0, record.not_before - self._clock.now().timestamp())
                    self._schedule.at_latest(self._clock.monotonic() + wait_s)
        self._plan_look()
        self._reporter.report(self.status(), self.last_error)
        return is_ok

    def _advance_all(self, view: View) -> bool:
        mine = [model for model in view.models() if self._is_mine(model)]
        if not view.time.is_trusted:
            for model in mine:
                self._steps.wait_for_clock(model, str(view.time))
            return False
        done = [self._advance(view, model) for model in mine]
        view.prune()
        return all(done)

    def _is_mine(self, model: str) -> bool:
        return model in self.config.models or EVERY_MODEL in self.config.models

    def _advance(self, view: View, model: str) -> bool:
        try:
            desired = view.desired(model)
            if desired is not None:
                self._steps.advance(desired, view.manifest, partial(view.release, model))
            self._failed.pop(model, None)
            return True
        except Exception as exc:
            self._failed[model] = code_of(exc), str(exc) or type(exc).__name__
            logger.warning("model %s is not brought up to date now: %s", model, exc)
            self._emit(SyncFailed(model=model, error=str(exc)))
            return False

    def _run(self) -> None:
        self._guarded(self.restore)
        self._restored.set()
        while (due := self._wait()) is not None:
            self._guarded(due)

    def _wait(self) -> Callable[[], object] | None:
        """Sleeps until a poll or a look is due, and says which; None when the agent is to stop."""
        with self._wakeup:
            while not self._is_stopping:
                now, looks_at = self._clock.monotonic(), self._looks_at
                if looks_at is not None and looks_at <= now:
                    return self.look
                if self._schedule.next_at <= now:
                    return self.run_once
                self._wakeup.wait(min(self._schedule.next_at, looks_at or self._schedule.next_at) - now)
            return None

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
