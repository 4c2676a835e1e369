"""What an agent can still do where it cannot write: hand what was committed to the installer.

The journal is read from a copy elsewhere (SQLite wants to write beside what it reads). What the copy learns is
forgotten: nothing is fetched, refused or rolled back for good.
"""

from __future__ import annotations

import contextlib
import logging

from common.clock import SystemClock
from common.errors import OutriderError
from sync.agent.agent import EVERY_MODEL, AgentConfig
from sync.agent.journal import Journal, journal_copy
from sync.agent.ports import Installer
from sync.agent.sources import source_of
from sync.agent.states import Record
from sync.agent.steps import StepOptions, Steps
from sync.events import Hook

_log = logging.getLogger(__name__)


def restore_frozen(config: AgentConfig, installer: Installer, on_event: Hook) -> None:
    """Never raises: what cannot be restored is logged, and the process serves without it."""
    try:
        with contextlib.ExitStack() as stack:
            copy = stack.enter_context(journal_copy(config.folder))
            journal = stack.enter_context(contextlib.closing(Journal(copy)))
            source = stack.enter_context(contextlib.closing(source_of(config.source, timeout_s=config.timeout_s)))
            now = SystemClock().now
            options = StepOptions(engines=config.engines)
            steps = Steps(config.folder, journal, installer, source, options, on_event, now)
            for record in journal.records():
                if record.model in config.models or EVERY_MODEL in config.models:
                    _restore(steps, record)
    except (OutriderError, OSError) as exc:
        _log.error("what is installed in %s is not restored: %s", config.folder, exc)


def _restore(steps: Steps, record: Record) -> None:
    """A link that cannot be taken away is no reason to leave the other models out."""
    try:
        steps.restore(record)
    except OSError as exc:
        _log.error("model %s is not restored: %s", record.model, exc)
