"""The agent inside a serving process: its options as they stand in a config file, its thread, its ear for hints."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from sync.agent.agent import EVERY_MODEL, Agent, AgentConfig
from sync.agent.ports import Installer
from sync.events import Hook, ignore
from sync.hints import Listener


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions:
    """The `[sync]` table of a node's or a worker's configuration."""

    source: str  # host:port of the sync service
    root: str  # path of the first root.json, brought here by a trusted way
    broker: str | None = None  # host:port for hints; None: polling alone
    group: str = "default"
    models: tuple[str, ...] = (EVERY_MODEL,)
    interval_s: float = 900.0
    min_gap_s: float = 1.0  # between two polls, whatever hints say

    def __post_init__(self) -> None:
        if not 0.1 <= self.interval_s <= 86_400 * 7:
            raise ValueError(f"interval_s must be 0.1..{86_400 * 7}, got {self.interval_s}")
        if not 0 <= self.min_gap_s <= self.interval_s:
            raise ValueError(f"min_gap_s must be 0..interval_s ({self.interval_s}), got {self.min_gap_s}")


@contextlib.asynccontextmanager
async def running_agent(
    options: SyncOptions, folder: Path, installer: Installer, *, engines: tuple[str, ...], on_event: Hook = ignore
) -> AsyncIterator[Agent]:
    """Restores what is on the disk before it yields, polls and listens meanwhile, ends the thread on leaving.

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
    except OSError as exc:
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
