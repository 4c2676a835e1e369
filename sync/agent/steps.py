"""The steps of one model towards its desired state: admit, fetch, build, gate, swap; and back to work after a restart.

`states.decide` says which step, the journal remembers it, this file does it. Every step may be cut off anywhere and is
asked for again: what it left is checked, never trusted. What comes after the swap is `watch.py`'s.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from common.errors import (
    BadRelease,
    BuildError,
    BuildTimedOut,
    EngineError,
    EngineUnavailable,
    IncompatibleRelease,
    InvalidRequest,
    NoSpace,
    Unavailable,
)
from sync.agent.failpoints import failpoint
from sync.agent.fetch import Assembly, Fetched
from sync.agent.journal import Journal, Release
from sync.agent.local import LocalSlabs, verify_files
from sync.agent.moves import Moves, kept
from sync.agent.peers import Peers
from sync.agent.ports import Installer, Source, Staged, never
from sync.agent.reasons import code_of
from sync.agent.space import reserve
from sync.agent.states import Code, Record, State, Step, decide
from sync.agent.watchdog import within
from sync.agent.window import Window
from sync.disk import sync_folder
from sync.events import Hook, Installed, SlabsFetched, SyncFailed
from sync.release import Desired, Manifest
from sync.trust.rules import check_epoch

MAX_ATTEMPTS: Final = 3  # builds begun per target, those that took the process down included

_AT_FAULT: Final = (EngineError, BuildError, InvalidRequest)  # the release is no good here
_DEFERRED: Final = (EngineUnavailable, Unavailable)  # this node is not ready: no fault of the release


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """What a node allows. `probation_s`: how long a version is on probation after it began to serve; 0: not at all.
    `build_timeout_s`: of preparing an engine, and of gating it."""

    engines: tuple[str, ...]
    window: Window | None = None  # in which may be fetched and installed; None: always
    probation_s: float = 0.0
    peers: tuple[str, ...] = ()  # host:port of nodes nearby, asked for slabs before the source
    build_timeout_s: float = 1800.0


class Steps:
    """Effects only; called from the agent's thread."""

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        installer: Installer,
        source: Source,
        options: StepOptions,
        emit: Hook,
        now: Callable[[], datetime],
        cancelled: Callable[[], bool] = never,
    ) -> None:
        """`cancelled`: the process is about to end."""
        self._models, self._staging = folder / "models", folder / "staging"
        self._journal, self._installer, self._source = journal, installer, source
        self._options, self._emit, self._now = options, emit, now
        self._cancelled, self._peers = cancelled, Peers(options.peers)
        self._moves = Moves(journal, emit)

    def installed(self) -> list[tuple[Release, Path]]:
        """Every release whose files are at their place, and where. From any thread."""
        records = self._journal.records()
        return [(one, self._final(one)) for record in records for one in self._journal.releases(record.model)]

    # --- after a restart ---

    def restore(self, record: Record) -> None:
        """Hands the committed version to the installer, from the disk alone; the one before when that is damaged."""
        problem = ""
        for version in (record.active, record.previous):
            release = None if version is None else self._journal.release(record.model, version)
            if release is None:
                continue
            damage = self.reinstall(release)
            if damage is None:
                if version != record.active:
                    self._fall_back(record, version, problem)
                return
            problem = problem or damage
        if problem:
            self._installer.withdraw(record.model, problem)
            self._fall_back(record, None, problem)
        elif record.state is State.GATED:
            self._installer.withdraw(record.model, "a start found its first version half installed")

    def _fall_back(self, record: Record, active: str | None, reason: str) -> None:
        gone = {"previous": None, "version": None, "digest": None, "deadline": None}
        self._moves.to(record, State.IDLE, Code.DAMAGED, reason, active=active, **gone)

    def reinstall(self, release: Release) -> str | None:
        """None when the release serves again; else what is wrong with it."""
        started = time.monotonic()
        damage = verify_files(release, self._final(release))
        if damage is not None:
            return damage
        try:
            self._installer.activate(self._installer.prepare(self._staged(release)))
        except Exception as exc:  # whatever it is, the node must come up with what it has
            return f"{release.manifest.name} could not be started: {exc}"
        manifest, seconds = release.manifest, time.monotonic() - started
        self._emit(Installed(model=manifest.model, version=manifest.version, was_restored=True, seconds=seconds))
        return None

    # --- towards the desired state ---

    def advance(
        self,
        desired: Desired,
        load: Callable[[Desired], Manifest],
        manifest_of: Callable[[str], Manifest | None] = lambda version: None,
    ) -> None:
        """Everything that can be done now. Raises what can be tried again; a refused release is not an error.

        `manifest_of`: the signed manifest of another version, over which an old one may get here.
        """
        self._manifest_of = manifest_of
        record = self._journal.record(desired.model)
        check_epoch(record.desired, desired)
        if record.desired != desired:
            record = self._journal.save(replace(record, desired=desired))
        if decide(record, desired, is_quarantined=False) in (Step.NOTHING, Step.WATCH):
            if record.code is Code.CLOCK:
                self._journal.save(replace(record, code=Code.SERVES, reason=""))
            return
        try:
            release = self._choose(load(desired))
        except IncompatibleRelease as exc:
            self._pass_by(record, str(exc))
            return
        except BadRelease as exc:
            self._moves.refuse(record, desired, Code.BAD_RELEASE, str(exc))
            return
        try:
            self._step(record, desired, release)
        except Exception as exc:
            self._explain(desired.model, exc)
            raise

    def wait_for_clock(self, model: str, reading: str) -> None:
        """Nothing is fetched or installed; what serves goes on, and so does a probation."""
        record = self._journal.record(model)
        if record.state not in (State.PROBATION, State.ROLLING_BACK) and record.reason != reading:
            self._journal.save(replace(record, code=Code.CLOCK, reason=reading))
            self._emit(SyncFailed(model=model, error=reading))

    def _explain(self, model: str, exc: Exception) -> None:
        """What is tried again says so meanwhile."""
        record = self._journal.record(model)
        code, reason = code_of(exc), str(exc) or type(exc).__name__
        is_said = record.code is code if code is Code.DISK_FULL else (record.code, record.reason) == (code, reason)
        if not is_said:
            self._journal.save(replace(record, code=code, reason=reason))

    def _step(self, record: Record, desired: Desired, release: Release) -> None:
        reason = self._journal.quarantine_reason(desired.model, desired.digest, release.plan)
        step = decide(record, desired, is_quarantined=reason is not None)
        if step is Step.ADOPT:
            target = {"version": desired.version, "digest": desired.digest}
            self._moves.to(record, State.COMMITTED, Code.SERVES, **target, attempts=0, not_before=None)
        elif step is Step.REFUSE:
            self._moves.refuse(record, desired, Code.GATE_FAILED, reason or "")
        elif step is Step.ADMIT:
            self._step(self._admit(record, desired, release), desired, release)
        elif step is Step.FETCH:
            if self._may_begin(record):
                staged = self._fetch(self._journal.record(record.model), release)
                if staged is not None:
                    self._build(staged, release)
        elif step is Step.BUILD:
            damage = verify_files(release, self._final(release))
            if damage is not None:
                again = self._moves.to(record, State.FETCHING, Code.DAMAGED, damage)
                self._step(again, desired, release)
            elif self._may_begin(record):
                self._build(self._journal.record(record.model), release)

    def _pass_by(self, record: Record, reason: str) -> None:
        """Nothing of this release runs here: no failure, and nothing to try again until another is desired."""
        if record.reason != reason:
            self._journal.save(replace(record, code=Code.NO_VARIANT, reason=reason))
            self._emit(SyncFailed(model=record.model, error=reason))

    # --- admitting ---

    def _admit(self, record: Record, desired: Desired, release: Release) -> Record:
        """Takes the target on. Space is reserved when it may begin, and again after a restart."""
        target = {"version": desired.version, "digest": desired.digest}
        record = self._moves.to(record, State.ADMITTED, Code.NEW, **target, attempts=0, not_before=None)
        failpoint("admitted")
        return record

    def _may_begin(self, record: Record) -> bool:
        """False outside the maintenance window: the model waits for it."""
        window, now = self._options.window, self._now()
        opens = None if window is None else window.opens_at(now)
        if opens is None:
            return True
        until = opens.timestamp()
        if record.code is not Code.WINDOW or record.not_before != until:
            reason = f"outside the maintenance window {window}"
            self._moves.to(record, State.WAITING, Code.WINDOW, reason, not_before=until)
        return False

    def _reserve(self, release: Release, staging: Path) -> None:
        """Room for every file of the release, or `NoSpace`, and nothing of it is left."""
        paths = set(release.paths())
        try:
            reserve(staging, (file for file in release.manifest.files if file.path in paths))
        except NoSpace as exc:
            shutil.rmtree(staging, ignore_errors=True)
            record = self._journal.record(release.manifest.model)
            if record.code is not Code.DISK_FULL:  # said once: each write would take some of what is left
                self._moves.to(record, State.WAITING, Code.DISK_FULL, str(exc))
            raise
        failpoint("reserved")

    # --- fetching ---

    def _fetch(self, record: Record, release: Release) -> Record | None:
        """STAGED, or None when the release was refused. What an interrupted fetch left is used."""
        final = self._final(release)
        try:
            if not final.is_dir() or verify_files(release, final) is not None:
                record = self._assemble(record, release, final)
            elif record.state is not State.FETCHING:
                record = self._moves.to(record, State.FETCHING, Code.NEW, not_before=None)
        except BadRelease as exc:
            self._refuse(self._journal.record(record.model), release, Code.BAD_RELEASE, str(exc))
            return None
        for folder in (final.parent, self._models, self._models.parent):  # also what an earlier process put there
            sync_folder(folder)
        failpoint("placed")
        return self._moves.stage(record, release)

    def _assemble(self, record: Record, release: Release, final: Path) -> Record:
        """Puts the files together beside the final place and moves the folder there in one rename."""
        manifest = release.manifest
        staging = self._staging / manifest.model / manifest.version
        _keep_only(staging.parent, {manifest.version})
        _keep_only(final.parent, kept(record) | {manifest.version})
        staging.mkdir(parents=True, exist_ok=True)
        self._reserve(release, staging)
        record = self._moves.to(record, State.FETCHING, Code.NEW, not_before=None)
        failpoint("fetching")
        known = [(one, self._final(one)) for one in self._journal.releases(manifest.model)]
        result, started = Fetched(), time.monotonic()
        try:
            Assembly(
                release,
                staging,
                LocalSlabs(known),
                cancelled=self._cancelled,
                manifest_of=self._manifest_of,
                peers=self._peers,
            ).run(self._source, result)
        finally:
            self._count(manifest, result, time.monotonic() - started)
        failpoint("assembled")
        if final.exists():
            shutil.rmtree(final)  # damaged, and the last use of its slabs is over
        final.parent.mkdir(parents=True, exist_ok=True)
        staging.rename(final)
        failpoint("renamed")
        return record

    def _count(self, manifest: Manifest, result: Fetched, seconds: float) -> None:
        counts = {f"bytes_{form}": count for form, count in result.bytes_by_form.items()}
        counts |= {"slabs_fetched": result.fetched, "slabs_reused": result.reused, "fallbacks": result.fallbacks}
        self._journal.count(manifest.model, counts)
        self._emit(
            SlabsFetched(
                model=manifest.model,
                version=manifest.version,
                bytes_by_form=dict(result.bytes_by_form),
                fetched=result.fetched,
                reused=result.reused,
                fallbacks=result.fallbacks,
                seconds=seconds,
            )
        )

    # --- installing ---

    def _build(self, record: Record, release: Release) -> None:
        """Prepare, gate, activate, and on probation. An exception leaves the old version serving."""
        if record.attempts >= MAX_ATTEMPTS:
            why = f"not built in {MAX_ATTEMPTS} attempts; last: {record.reason or 'crash'}"
            self._refuse(record, release, Code.BUILD_FAILED, why)
            return
        attempts = record.attempts + 1
        record = self._moves.to(record, State.BUILDING, Code.NEW, record.reason, attempts=attempts, not_before=None)
        failpoint("building")
        started = time.monotonic()
        try:
            gated = self._prepare_and_activate(record, release)
        except _AT_FAULT as exc:
            self._refuse(self._journal.record(record.model), release, Code.BUILD_FAILED, str(exc))
            return
        except _DEFERRED as exc:
            self._moves.to(record, State.WAITING, Code.NOT_READY, str(exc), attempts=attempts - 1)
            raise
        except Exception as exc:
            latest = self._journal.record(record.model)
            self._journal.save(replace(latest, code=code_of(exc), reason=f"{type(exc).__name__}: {exc}"))
            raise
        if gated is not None:
            self._serve(gated, release, time.monotonic() - started)

    def _prepare_and_activate(self, record: Record, release: Release) -> Record | None:
        """GATED and serving, or None when the gate refused it."""
        limit_s, installer = self._options.build_timeout_s, self._installer
        name, staged = release.manifest.name, self._staged(release)
        prepared = within(limit_s, f"the build of {name}", lambda: installer.prepare(staged), installer.discard)
        try:
            failpoint("prepared")
            verdict = within(
                limit_s, f"the gate of {name}", lambda: installer.gate(prepared), lambda _: installer.discard(prepared)
            )
            if verdict.passed:
                record = self._moves.to(record, State.GATED, Code.NEW, verdict.detail)
                failpoint("gated")
                self._installer.activate(prepared)
                failpoint("activated")
                return record
        except BuildTimedOut:  # still in use: it is discarded when the gate comes back
            raise
        except Exception:
            self._installer.discard(prepared)
            raise
        self._installer.discard(prepared)
        self._refuse(record, release, Code.GATE_FAILED, f"golden gate: {verdict.detail}")
        return None

    def _serve(self, record: Record, release: Release, seconds: float) -> None:
        """On probation, or committed where there is none."""
        version = release.manifest.version
        previous = record.active if record.active != version else record.previous
        deadline = self._now().timestamp() + self._options.probation_s
        changes: dict[str, Any] = {"active": version, "previous": previous, "deadline": deadline}
        record = self._moves.to(record, State.PROBATION, Code.NEW, attempts=0, starts=0, **changes)
        self._emit(Installed(model=record.model, version=version, was_restored=False, seconds=seconds))
        failpoint("on probation")
        if not self._options.probation_s:
            self.commit(record)

    def commit(self, record: Record) -> None:
        """It stays. Active and previous are kept; the rest goes."""
        record = self._moves.to(record, State.COMMITTED, Code.SERVES, deadline=None, starts=0)
        self._installer.settle(record.model)
        failpoint("committed")
        keep = kept(record)
        self._journal.forget_releases(record.model, keep)
        self.remove_all_but(record.model, keep)

    def remove_all_but(self, model: str, versions: set[str]) -> None:
        _keep_only(self._models / model, versions)
        _keep_only(self._staging / model, set())

    def _choose(self, manifest: Manifest) -> Release:
        """The first variant, in the release's order, that an engine of this node runs, in the node's order."""
        engines = self._options.engines
        for variant in manifest.variants:
            for engine in engines:
                if engine in variant.files and self._installer.can_run(manifest.model, engine, variant):
                    return Release(manifest=manifest, variant=variant.name, engine=engine)
        offers = ", ".join(f"{one.name} ({'/'.join(one.files)})" for one in manifest.variants)
        problem = f"this node runs {', '.join(engines) or 'no engine'}, the release has {offers or 'no variant'}"
        raise IncompatibleRelease(manifest.model, manifest.version, problem)

    def _refuse(self, record: Record, release: Release, code: Code, reason: str) -> None:
        """Quarantine, and the space is free again."""
        self._moves.quarantine(record, release, code, reason)
        self.remove_all_but(record.model, kept(record))

    # --- places ---

    def _final(self, release: Release) -> Path:
        return self._models / release.manifest.model / release.manifest.version

    def _staged(self, release: Release) -> Staged:
        manifest = release.manifest
        return Staged(
            model=manifest.model,
            version=manifest.version,
            folder=self._final(release),
            variant=release.variant,
            engine=release.engine,
        )


def _keep_only(folder: Path, names: set[str]) -> None:
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.name not in names:
                shutil.rmtree(entry, ignore_errors=True)
