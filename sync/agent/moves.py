"""Changes of a model's state: written to the journal first, told to the hook second."""

from __future__ import annotations

from typing import Any

from sync.agent.journal import Journal, Release
from sync.agent.states import Record, State
from sync.events import Hook, Quarantined, StateChanged
from sync.release import Desired


class Moves:
    def __init__(self, journal: Journal, emit: Hook) -> None:
        self._journal, self._emit = journal, emit

    def to(self, record: Record, state: State, **changes: Any) -> Record:
        """Enters `state` with `changes` to the record's other fields. Returns the new record."""
        new = self._journal.enter(record, state, **changes)
        self._tell(record, new)
        return new

    def stage(self, record: Record, release: Release) -> Record:
        """STAGED, together with the knowledge of which files are here."""
        with self._journal.transaction():
            self._journal.save_release(release)
            new = self._journal.enter(record, State.STAGED)
        self._tell(record, new)
        return new

    def quarantine(self, record: Record, release: Release, reason: str) -> None:
        """Refuses this content for good, for the way in which it was built here."""
        keep = kept(record)
        with self._journal.transaction():
            digest, version = release.manifest.digest(), release.manifest.version
            self._journal.quarantine(record.model, digest, release.plan, version, reason)
            self._journal.forget_releases(record.model, keep)
            new = self._journal.enter(record, State.QUARANTINED, version=version, digest=digest, reason=reason)
        self._tell_refused(record, new)

    def refuse(self, record: Record, desired: Desired, reason: str) -> None:
        """Stands by an earlier refusal (or refuses an unreadable manifest); says so once."""
        if (record.state, record.version) != (State.QUARANTINED, desired.version):
            new = self._journal.enter(
                record, State.QUARANTINED, version=desired.version, digest=desired.digest, reason=reason
            )
            self._tell_refused(record, new)

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
