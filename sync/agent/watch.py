"""What comes after the swap: a version on probation is watched, and stays or makes way for the one before.

`probation.judge` has the rules. A rollback is decided in the journal first: from there on a restart, too, serves the
version before, and the refused content is not fetched again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Final

from sync.agent.failpoints import failpoint
from sync.agent.journal import Journal
from sync.agent.moves import Moves
from sync.agent.ports import Installer
from sync.agent.probation import MAX_STARTS, Failed, ProbationLimits, judge
from sync.agent.states import Code, Record, State
from sync.agent.steps import Steps
from sync.events import Hook

logger = logging.getLogger(__name__)
LOOK_S: Final = 0.2  # between two looks at what is on probation: a rollback comes within a second


class Watch:
    """Effects only; called from the agent's thread."""

    def __init__(
        self,
        journal: Journal,
        installer: Installer,
        steps: Steps,
        limits: ProbationLimits,
        emit: Hook,
        now: Callable[[], datetime],
    ) -> None:
        self._journal, self._installer, self._steps = journal, installer, steps
        self._limits, self._now = limits, now
        self._moves = Moves(journal, emit)

    def restore(self, record: Record) -> Record:
        """At a start of the process, before anything is handed to the installer: what is left of a rollback, and a
        version that does not let the process live."""
        if record.state is State.PROBATION and self._now().timestamp() < (record.deadline or 0.0):
            record = self._journal.save(replace(record, starts=record.starts + 1))
            if record.starts > MAX_STARTS:
                reason = f"the process was started {record.starts} times while {record.active} was on probation"
                record = self._begin(record, Failed(code=Code.CRASHES, reason=reason))
        return record

    def after_restore(self, record: Record) -> None:
        """The installer serves `record.active`, or nothing."""
        if record.state is State.ROLLING_BACK:
            if record.active is None:
                self._withdraw(record)
            self._end(record, record.active)

    def look(self) -> bool:
        """Judges every version on probation. True while there is one, which wants another look after `LOOK_S`."""
        watched = [one for one in self._journal.records() if one.state in (State.PROBATION, State.ROLLING_BACK)]
        return sum(self._look(one) for one in watched) > 0

    def _look(self, record: Record) -> bool:
        if record.state is State.ROLLING_BACK:  # the revert did not get through
            self._revert(record)
            return False
        failed = self._failure(record)
        if failed is not None:
            self._revert(self._begin(record, failed))
            return False
        left = (record.deadline or 0.0) - self._now().timestamp()
        if left > self._limits.seconds:  # the clock was set back
            self._journal.save(replace(record, deadline=self._now().timestamp() + self._limits.seconds))
        if left > 0:
            return True
        failed = self._recheck(record)
        if failed is not None:
            self._revert(self._begin(record, failed))
        else:
            self._steps.commit(record)
        return False

    def _failure(self, record: Record) -> Failed | None:
        found = self._installer.vitals(record.model)
        if found is None or found[0].version != record.active:
            return None
        return judge(found[0], found[1], self._limits)

    def _recheck(self, record: Record) -> Failed | None:
        """The golden set again, once, on the engine as it serves."""
        verdict = self._installer.recheck(record.model)
        if verdict is None or verdict.passed:
            return None
        return Failed(code=Code.GATE_FAILED, reason=f"golden set, run again after the swap: {verdict.detail}")

    # --- back ---

    def _begin(self, record: Record, failed: Failed) -> Record:
        release = self._journal.release(record.model, record.active or "")
        if release is None:  # nothing to refuse by its content: the journal is of another time
            raise AssertionError(f"{record.model}/{record.active} serves, and the journal does not have it")
        logger.warning("%s is rolled back: %s", release.manifest.name, failed.reason)
        record = self._moves.begin_rollback(record, release, failed.code, failed.reason)
        failpoint("rolling back")
        return record

    def _revert(self, record: Record) -> None:
        """The engine before is swapped back; where it is not open any more, it is opened from the disk."""
        if record.active is not None and self._installer.revert(record.model):
            failpoint("reverted")
            self._end(record, record.active)
            return
        release = None if record.active is None else self._journal.release(record.model, record.active)
        damage = None if release is None else self._steps.reinstall(release)
        if release is not None and damage is None:
            self._installer.settle(record.model)
            self._end(record, record.active)
            return
        if damage is not None:
            logger.error("%s: %s", record.model, damage)
        self._withdraw(record)
        self._end(record, None)

    def _withdraw(self, record: Record) -> None:
        self._installer.withdraw(record.model, f"version {record.version} was refused: {record.reason}")

    def _end(self, record: Record, active: str | None) -> None:
        new = self._moves.end_rollback(record, active)
        self._steps.remove_all_but(new.model, {active} if active else set())
