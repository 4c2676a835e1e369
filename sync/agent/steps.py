"""The steps of one model towards its desired state: fetch, stage, build, gate, swap; and back to work after a restart.

`states.decide` says which step, the journal remembers it, this file does it. Every step may be cut off anywhere and is
asked for again: what it left is checked, never trusted.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from common.errors import (
    BadRelease,
    BuildError,
    EngineError,
    EngineUnavailable,
    IncompatibleRelease,
    InvalidRequest,
    Unavailable,
)
from sync.agent.fetch import Assembly, Fetched
from sync.agent.journal import Journal, Release
from sync.agent.local import LocalSlabs, verify_files
from sync.agent.moves import Moves, kept
from sync.agent.ports import Installer, Source, Staged
from sync.agent.states import Record, State, Step, decide
from sync.events import Hook, Installed, SlabsFetched, SyncFailed
from sync.release import Desired, Manifest
from sync.store import sync_folder
from sync.trust.rules import check_epoch

MAX_ATTEMPTS: Final = 3  # builds begun per target, those that took the process down included

_AT_FAULT: Final = (EngineError, BuildError, InvalidRequest)  # the release is no good here
_DEFERRED: Final = (EngineUnavailable, Unavailable)  # this node is not ready: no fault of the release


class Steps:
    """Effects only; called from the agent's thread."""

    def __init__(
        self, folder: Path, journal: Journal, installer: Installer, source: Source, engines: tuple[str, ...], emit: Hook
    ) -> None:
        self._models, self._staging = folder / "models", folder / "staging"
        self._journal, self._installer, self._source = journal, installer, source
        self._engines, self._emit = engines, emit
        self._moves = Moves(journal, emit)

    def restore(self, record: Record) -> None:
        """Hands the committed version to the installer, from the disk alone; the one before when that is damaged."""
        problem = ""
        for version in (record.active, record.previous):
            release = None if version is None else self._journal.release(record.model, version)
            if release is None:
                continue
            damage = self._reinstall(release)
            if damage is None:
                if version != record.active:
                    self._fall_back(record, version, problem)
                return
            problem = problem or damage
        if problem:
            self._fall_back(record, None, problem)

    def _fall_back(self, record: Record, active: str | None, reason: str) -> None:
        self._moves.to(record, State.IDLE, reason=reason, active=active, previous=None, version=None, digest=None)

    def advance(self, desired: Desired, load: Callable[[Desired], Manifest]) -> None:
        """Everything that can be done now. Raises what can be tried again; a refused release is not an error."""
        record = self._journal.record(desired.model)
        check_epoch(record.desired, desired)
        if record.desired != desired:
            record = self._journal.save(replace(record, desired=desired))
        if record.state is State.COMMITTED and record.version == record.active == desired.version:
            return
        try:
            release = self._choose(load(desired))
        except IncompatibleRelease as exc:
            self._pass_by(record, str(exc))
            return
        except BadRelease as exc:
            self._moves.refuse(record, desired, str(exc))
            return
        self._step(record, desired, release)

    def _step(self, record: Record, desired: Desired, release: Release) -> None:
        reason = self._journal.quarantine_reason(desired.model, desired.digest, release.plan)
        step = decide(record, desired, is_quarantined=reason is not None)
        if step is Step.ADOPT:
            version, digest = desired.version, desired.digest
            self._moves.to(record, State.COMMITTED, version=version, digest=digest, reason="", attempts=0)
        elif step is Step.REFUSE:
            self._moves.refuse(record, desired, reason or "")
        elif step is Step.FETCH:
            staged = self._fetch(record, desired, release)
            if staged is not None:
                self._build(staged, release)
        elif step is Step.BUILD:
            damage = verify_files(release, self._final(release))
            if damage is None:
                self._build(record, release)
            else:
                self._step(self._moves.to(record, State.FETCHING, reason=damage), desired, release)

    def _pass_by(self, record: Record, reason: str) -> None:
        """Nothing of this release runs here: no failure, and nothing to try again until another is desired."""
        if record.reason != reason:
            self._journal.save(replace(record, reason=reason))
            self._emit(SyncFailed(model=record.model, error=reason))

    # --- fetching ---

    def _fetch(self, record: Record, desired: Desired, release: Release) -> Record | None:
        """STAGED, or None when the release was refused. What an interrupted fetch left is used."""
        version, digest = desired.version, desired.digest
        record = self._moves.to(record, State.FETCHING, version=version, digest=digest, reason="", attempts=0)
        final = self._final(release)
        try:
            if not final.is_dir() or verify_files(release, final) is not None:
                self._assemble(release, final)
        except BadRelease as exc:
            self._refuse(record, release, str(exc))
            return None
        except Exception as exc:
            self._journal.save(replace(record, reason=str(exc)))
            raise
        return self._moves.stage(record, release)

    def _assemble(self, release: Release, final: Path) -> None:
        """Puts the files together beside the final place and moves the folder there in one rename."""
        manifest = release.manifest
        _keep_only(self._staging / manifest.model, {manifest.version})
        staging = self._staging / manifest.model / manifest.version
        staging.mkdir(parents=True, exist_ok=True)
        known = [(one, self._final(one)) for one in self._journal.releases(manifest.model)]
        result, started = Fetched(), time.monotonic()
        try:
            Assembly(release, staging, LocalSlabs(known)).run(self._source, result)
        finally:
            self._count(manifest, result, time.monotonic() - started)
        if final.exists():
            shutil.rmtree(final)  # damaged, and the last use of its slabs is over
        final.parent.mkdir(parents=True, exist_ok=True)
        staging.rename(final)
        for folder in (final.parent, self._models, self._models.parent):
            sync_folder(folder)

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
        """Prepare, gate, activate, commit. An exception leaves the old version serving."""
        if record.attempts >= MAX_ATTEMPTS:
            self._refuse(record, release, f"not built in {MAX_ATTEMPTS} attempts; last: {record.reason or 'crash'}")
            return
        record = self._journal.save(replace(record, attempts=record.attempts + 1))
        started = time.monotonic()
        try:
            gated = self._prepare_and_activate(record, release)
        except _AT_FAULT as exc:
            self._refuse(record, release, str(exc))
            return
        except _DEFERRED as exc:
            self._journal.save(replace(record, attempts=record.attempts - 1, reason=str(exc)))
            raise
        except Exception as exc:
            self._journal.save(replace(record, reason=f"{type(exc).__name__}: {exc}"))
            raise
        if gated is not None:
            self._commit(gated, release, time.monotonic() - started)

    def _prepare_and_activate(self, record: Record, release: Release) -> Record | None:
        """GATED and serving, or None when the gate refused it."""
        prepared = self._installer.prepare(self._staged(release))
        try:
            verdict = self._installer.gate(prepared)
            if verdict.passed:
                record = self._moves.to(record, State.GATED, reason="")
                self._installer.activate(prepared)
                return record
        except Exception:
            self._installer.discard(prepared)
            raise
        self._installer.discard(prepared)
        self._refuse(record, release, f"golden gate: {verdict.detail}")
        return None

    def _commit(self, record: Record, release: Release, seconds: float) -> None:
        version = release.manifest.version
        previous = record.active if record.active != version else record.previous
        record = self._moves.to(record, State.COMMITTED, reason="", attempts=0, active=version, previous=previous)
        self._emit(Installed(model=record.model, version=version, was_restored=False, seconds=seconds))
        self._remove_old(record)

    def _remove_old(self, record: Record) -> None:
        """Active and previous stay; the rest goes."""
        keep = kept(record)
        self._journal.forget_releases(record.model, keep)
        _keep_only(self._models / record.model, keep)
        _keep_only(self._staging / record.model, set())

    def _reinstall(self, release: Release) -> str | None:
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

    def _choose(self, manifest: Manifest) -> Release:
        """The first variant, in the release's order, that an engine of this node runs, in the node's order."""
        for variant in manifest.variants:
            for engine in self._engines:
                if engine in variant.files and self._installer.can_run(manifest.model, engine, variant):
                    return Release(manifest=manifest, variant=variant.name, engine=engine)
        offers = ", ".join(f"{one.name} ({'/'.join(one.files)})" for one in manifest.variants)
        problem = f"this node runs {', '.join(self._engines) or 'no engine'}, the release has {offers or 'no variant'}"
        raise IncompatibleRelease(manifest.model, manifest.version, problem)

    def _refuse(self, record: Record, release: Release, reason: str) -> None:
        """Quarantine, and the space is free again."""
        self._moves.quarantine(record, release, reason)
        _keep_only(self._models / record.model, kept(record))
        _keep_only(self._staging / record.model, set())

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
