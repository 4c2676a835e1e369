"""What an agent can still do where it cannot write: hand what was committed to the installer.

The journal is read from a copy elsewhere (SQLite wants to write beside what it reads). What the copy learns is
forgotten: nothing is fetched, refused or rolled back for good.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from pathlib import Path

from common.errors import OutriderError
from sync.agent.agent import EVERY_MODEL, AgentConfig
from sync.agent.client import GrpcSource
from sync.agent.journal import Journal
from sync.agent.ports import Installer
from sync.agent.steps import Steps
from sync.events import Hook

_log = logging.getLogger(__name__)
_MEMORY = Path("/dev/shm")  # noqa: S108  # a private folder is made in it; a full disk may be that of /tmp too


def restore_frozen(config: AgentConfig, installer: Installer, on_event: Hook) -> None:
    """Never raises: what cannot be restored is logged, and the process serves without it."""
    try:
        with contextlib.ExitStack() as stack:
            home = _MEMORY if _MEMORY.is_dir() else None
            copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-", dir=home)))
            for name in ("journal.db", "journal.db-wal"):
                if (config.folder / name).exists():
                    shutil.copyfile(config.folder / name, copy / name)
            journal = stack.enter_context(contextlib.closing(Journal(copy / "journal.db")))
            source = stack.enter_context(contextlib.closing(GrpcSource(config.source, timeout_s=config.timeout_s)))
            steps = Steps(config.folder, journal, installer, source, config.engines, on_event)
            for record in journal.records():
                if record.model in config.models or EVERY_MODEL in config.models:
                    steps.restore(record)
    except (OutriderError, OSError) as exc:
        _log.error("what is installed in %s is not restored: %s", config.folder, exc)
