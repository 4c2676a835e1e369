"""The agent inside a serving process: its options as they stand in a config file, its thread, its ear for hints."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, FolderUnusable
from sync.agent.agent import EVERY_MODEL, Agent, AgentConfig
from sync.agent.frozen import restore_frozen
from sync.agent.ports import Installer
from sync.events import Hook, PollDone, ignore
from sync.hints import Listener

_log = logging.getLogger(__name__)
_WORN = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO)  # a disk at its end; anything else is a wrong setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions:
    """The `[sync]` table of a node's or a worker's configuration."""

    source: str  # host:port of the sync service
    root: str  # path of the first root.json, brought here by a trusted way
    broker: str | None = None  # host:port for hints; None: polling alone
    group: str = "default"  # whose hints to listen to; the service names the same
    models: tuple[str, ...] = (EVERY_MODEL,)  # models to keep fresh; "*": every one that is released
    interval_s: float = 900.0  # 0.1..604800: time between two polls, 10 % more or less
    # 0..: shortest time between two polls, whatever hints say; at most interval_s
    min_gap_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0.1 <= self.interval_s <= 86_400 * 7:
            raise ValueError(f"interval_s must be 0.1..{86_400 * 7}, got {self.interval_s}")
        if not 0 <= self.min_gap_s <= self.interval_s:
            raise ValueError(f"min_gap_s must be 0..interval_s ({self.interval_s}), got {self.min_gap_s}")


@contextlib.asynccontextmanager
async def running_agent(
    options: SyncOptions, folder: Path, installer: Installer, *, engines: tuple[str, ...], on_event: Hook = ignore
) -> AsyncIterator[Agent | None]:
    """Restores what is on the disk before it yields, polls and listens meanwhile, ends the thread on leaving.

    None where the disk is full or read-only: what was committed serves, and nothing new comes until the next start.
    Raises `StoreBusy` when another agent has `folder`, `ConfigError` when there is no root at `options.root`.
    """
    config = AgentConfig(
        folder=folder,
        root=Path(options.root),
        source=options.source,
        models=options.models,
        engines=engines,
        interval_s=options.interval_s,
        min_gap_s=options.min_gap_s,
    )
    try:
        agent = await asyncio.to_thread(Agent, config, installer, on_event=on_event)
    except (FolderUnusable, OSError) as exc:
        if isinstance(exc, FolderUnusable) or exc.errno in _WORN:
            problem = str(exc) if isinstance(exc, FolderUnusable) else f"{exc.filename or folder}: {exc.strerror}"
            _log.error("no updates of parameters: %s; serving what is installed", problem)
            on_event(PollDone(error=problem, seconds=0.0))
            await asyncio.to_thread(restore_frozen, config, installer, on_event)
            yield None
            return
        accepted = "the sync service's first root.json, and a folder to write in"
        raise ConfigError("sync", str(exc.filename or folder), f"cannot be used: {exc.strerror}", accepted) from exc
    agent.start()
    listening: asyncio.Task[None] | None = None
    try:
        await asyncio.to_thread(agent.wait_restored, 60.0)
        if options.broker is not None:
            listener = Listener(options.broker, agent.hint, group=options.group)
            listening = asyncio.create_task(listener.run(), name="hint-listener")
        yield agent
    finally:
        if listening is not None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        await asyncio.to_thread(agent.stop)
