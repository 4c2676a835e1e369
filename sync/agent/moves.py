"""Changes of a model's state: written to the journal first, told to the hook second."""

from __future__ import annotations

from typing import Any

from sync.agent.journal import Journal, Release
from sync.agent.states import Code, Record, State
from sync.events import Hook, Quarantined, StateChanged
from sync.release import Desired


class Moves:
    def __init__(self, journal: Journal, emit: Hook) -> None:
        self._journal, self._emit = journal, emit

    def to(self, record: Record, state: State, code: Code = Code.NONE, reason: str = "", **changes: Any) -> Record:
        """Enters `state` with `changes` to the record's other fields. Returns the new record."""
        new = self._journal.enter(record, state, code=code, reason=reason, **changes)
        self._tell(record, new)
        return new

    def stage(self, record: Record, release: Release) -> Record:
        """STAGED, together with the knowledge of which files are here."""
        with self._journal.transaction():
            self._journal.save_release(release)
            new = self._journal.enter(record, State.STAGED, code=Code.NEW, reason="")
        self._tell(record, new)
        return new

    def quarantine(self, record: Record, release: Release, code: Code, reason: str) -> None:
        """Refuses this content for good, for the way in which it was built here."""
        digest, version = release.manifest.digest(), release.manifest.version
        with self._journal.transaction():
            self._journal.quarantine(record.model, digest, release.plan, version, reason)
            self._journal.forget_releases(record.model, kept(record))
            new = self._refused(record, version, digest, code, reason)
        self._tell_refused(record, new)

    def begin_rollback(self, record: Record, release: Release, code: Code, reason: str) -> Record:
        """Refuses what serves; the version before it is `active` from here on, whatever happens."""
        digest, version = release.manifest.digest(), release.manifest.version
        with self._journal.transaction():
            self._journal.quarantine(record.model, digest, release.plan, version, reason)
            new = self._journal.enter(
                record,
                State.ROLLING_BACK,
                code=code,
                reason=reason,
                active=record.previous,
                previous=None,
                deadline=None,
            )
        self._tell(record, new)
        return new

    def end_rollback(self, record: Record, active: str | None) -> Record:
        """`active`: what really serves now, None where it is nothing."""
        with self._journal.transaction():
            self._journal.forget_releases(record.model, {active} if active else set())
            state = State.CLOUD_ONLY if active is None else State.QUARANTINED
            new = self._journal.enter(record, state, active=active)
        self._tell_refused(record, new)
        return new

    def refuse(self, record: Record, desired: Desired, code: Code, reason: str) -> None:
        """Stands by an earlier refusal (or refuses an unreadable manifest); says so once."""
        is_refused = record.state in (State.QUARANTINED, State.CLOUD_ONLY)
        if not is_refused or record.version != desired.version:
            new = self._refused(record, desired.version, desired.digest, code, reason)
            self._tell_refused(record, new)

    def _refused(self, record: Record, version: str, digest: str, code: Code, reason: str) -> Record:
        state = State.CLOUD_ONLY if record.active is None else State.QUARANTINED
        return self._journal.enter(
            record, state, version=version, digest=digest, code=code, reason=reason, not_before=None
        )

    def _tell_refused(self, old: Record, new: Record) -> None:
        version, digest = new.version or "", new.digest or ""
        self._emit(Quarantined(model=new.model, version=version, digest=digest, reason=new.reason))
        self._tell(old, new)

    def _tell(self, old: Record, new: Record) -> None:
        if (old.state, old.version) != (new.state, new.version):
            version = new.version or ""
            self._emit(StateChanged(model=new.model, version=version, old=old.state, new=new.state, reason=new.reason))


def kept(record: Record) -> set[str]:
    """The versions whose files stay: what serves, and what served before."""
    return {version for version in (record.active, record.previous) if version is not None}
