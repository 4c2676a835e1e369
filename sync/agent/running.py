"""The agent inside a serving process: its options as they stand in a config file, its thread, its ear for hints."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError, FolderUnusable
from sync.agent.agent import EVERY_MODEL, Agent, AgentConfig
from sync.agent.frozen import restore_frozen
from sync.agent.in_memory import memory_folder
from sync.agent.peer_service import peer_service
from sync.agent.ports import Installer
from sync.agent.probation import ProbationLimits
from sync.agent.reports import GrpcReports, NoReports, Reporter
from sync.agent.window import Window
from sync.events import Hook, PollDone, ignore
from sync.hints import Listener

if TYPE_CHECKING:
    from sync.pki.identity import Identity

_log = logging.getLogger(__name__)
_WORN = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO)  # a disk at its end; anything else is a wrong setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions:
    """The `[sync]` table of a node's or a worker's configuration."""

    source: str  # host:port of the sync service, or where a store lies: http://, https://, s3://bucket/prefix
    root: str  # path of the first root.json, brought here by a trusted way
    broker: str | None = None  # host:port for hints; None: polling alone
    group: str = "default"  # whose hints to listen to; the service names the same
    # folder that `outrider sync enrol` filled: TLS with service and broker, showing its certificate; none: plain
    identity: str | None = None
    ca: str | None = None  # path of the CA's certificate, which they must show; none: ca.pem in the identity's folder
    models: tuple[str, ...] = (EVERY_MODEL,)  # models to keep fresh; "*": every one that is released
    interval_s: float = 900.0  # 0.1..604800: time between two polls, 10 % more or less
    # 0..: shortest time between two polls, whatever hints say; at most interval_s
    min_gap_s: float = 1.0
    rate_bytes_s: float | None = None  # 1024..: of what is read from a sync service; none: no limit
    peers: tuple[str, ...] = ()  # host:port of nodes nearby, asked for slabs before the service; not with identity
    # host:port where this node gives slabs to its peers: whoever reaches it reads parameters; none: nowhere
    serve_peers: str | None = None
    reports: bool = True  # whether the sync service is told where this node stands, after each poll
    window: str | None = None  # HH:MM-HH:MM (UTC) of each day in which may be fetched and installed; none: always
    # 0..86400: how long a version is watched after it began to serve, the one before kept ready; 0: not at all
    probation_s: float = 60.0
    # 1..86400: of preparing an engine for a new version, and of its golden set; three that take longer refuse it
    build_timeout_s: float = 1800.0
    max_error_share: float = 0.05  # 0..1: of its calls that may fail in probation, beyond the share of the one before
    latency_factor: float = 5.0  # 0..: times the latency of the one before that it may take in probation; 0: any

    def __post_init__(self) -> None:
        if not 0.1 <= self.interval_s <= 86_400 * 7:
            raise ValueError(f"interval_s must be 0.1..{86_400 * 7}, got {self.interval_s}")
        if "://" not in self.source and not _is_address(self.source):
            raise ValueError(f"source must be host:port, http://, https:// or s3://bucket/prefix, got {self.source!r}")
        if self.broker is not None and not _is_address(self.broker):
            raise ValueError(f"broker must be host:port, got {self.broker!r}")
        if self.identity is not None and "://" in self.source:
            raise ValueError(f"identity is for a sync service at host:port, not for {self.source!r}")
        if self.ca is not None and self.identity is None:
            raise ValueError("ca belongs to TLS: it needs identity, a folder that `outrider sync enrol` filled")
        if not 0 <= self.min_gap_s <= self.interval_s:
            raise ValueError(f"min_gap_s must be 0..interval_s ({self.interval_s}), got {self.min_gap_s}")
        if not 0 <= self.probation_s <= 86_400:
            raise ValueError(f"probation_s must be 0..86400, got {self.probation_s}")
        if not 1 <= self.build_timeout_s <= 86_400:
            raise ValueError(f"build_timeout_s must be 1..86400, got {self.build_timeout_s}")
        if not 0 <= self.max_error_share <= 1 or not 0 <= self.latency_factor < math.inf:
            raise ValueError("max_error_share must be 0..1 and latency_factor 0 or more")
        if self.window is not None:
            Window.parse(self.window)
        if self.rate_bytes_s is not None and not 1024 <= self.rate_bytes_s < math.inf:
            raise ValueError(f"rate_bytes_s must be 1024 or more, got {self.rate_bytes_s}")
        for address in (*self.peers, *([] if self.serve_peers is None else [self.serve_peers])):
            if not _is_address(address):
                raise ValueError(f"peers and serve_peers must be host:port, got {address!r}")
        if self.identity is not None and (self.peers or self.serve_peers):
            raise ValueError("peers and serve_peers are plain gRPC, which identity (TLS) rules out")

    @property
    def probation(self) -> ProbationLimits:
        return ProbationLimits(
            seconds=self.probation_s, max_error_share=self.max_error_share, latency_factor=self.latency_factor
        )


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit()


def agent_config(options: SyncOptions, folder: Path, engines: tuple[str, ...]) -> AgentConfig:
    return AgentConfig(
        folder=folder,
        identity=_identity(options),
        root=Path(options.root),
        source=options.source,
        models=options.models,
        engines=engines,
        interval_s=options.interval_s,
        min_gap_s=options.min_gap_s,
        window=None if options.window is None else Window.parse(options.window),
        probation=options.probation,
        rate_bytes_s=options.rate_bytes_s,
        peers=options.peers,
        build_timeout_s=options.build_timeout_s,
    )


@contextlib.asynccontextmanager
async def running_agent(
    options: SyncOptions,
    folder: Path,
    installer: Installer,
    *,
    name: str,
    engines: tuple[str, ...],
    on_event: Hook = ignore,
    in_memory: bool = True,
) -> AsyncIterator[Agent | None]:
    """Restores what is on the disk before it yields, polls and listens meanwhile, ends the thread on leaving.

    `name`: as which this node reports, unless it has a certificate: then its name counts.

    Where the disk takes no writes, what was committed serves and new versions are kept in memory. None where that
    cannot be, or is not wanted (`in_memory`): nothing new comes until the next start.
    Raises `StoreBusy` when another agent has `folder`, `ConfigError` when there is no root at `options.root`.
    """
    config = agent_config(options, folder, engines)
    identity = config.identity
    memory_stack, stack = contextlib.ExitStack(), contextlib.ExitStack()
    reporter = reporter_of(options, name, identity)
    try:
        agent = await asyncio.to_thread(Agent, config, installer, on_event=on_event, reporter=reporter)
    except (FolderUnusable, OSError) as exc:
        if isinstance(exc, FolderUnusable) or exc.errno in _WORN:
            problem = str(exc) if isinstance(exc, FolderUnusable) else f"{exc.filename or folder}: {exc.strerror}"
            on_event(PollDone(error=problem, seconds=0.0))
            memory = await asyncio.to_thread(memory_stack.enter_context, memory_folder(folder)) if in_memory else None
            if memory is None:
                _log.error("no updates of parameters: %s; serving what is installed", problem)
                await asyncio.to_thread(restore_frozen, config, installer, on_event)
                with memory_stack:
                    yield None
                return
            _log.error("%s; serving what is installed, new versions are kept in memory until the next start", problem)
            config = replace(config, folder=memory)
            try:
                agent = await asyncio.to_thread(Agent, config, installer, on_event=on_event, reporter=reporter)
            except BaseException:
                memory_stack.close()
                raise
        else:
            accepted = "the sync service's first root.json, and a folder to write in"
            raise ConfigError("sync", str(exc.filename or folder), f"cannot be used: {exc.strerror}", accepted) from exc
    agent.start()
    tasks: list[asyncio.Task[None]] = []
    try:
        await asyncio.to_thread(agent.wait_restored, 60.0)
        if options.broker is not None:
            listener = Listener(options.broker, agent.hint, group=options.group, identity=identity)
            tasks.append(asyncio.create_task(listener.run(), name="hint-listener"))
        if options.serve_peers is not None:
            serving = peer_service(options.serve_peers, agent.installed)
            _log.info("slabs for peers at %s", await asyncio.to_thread(stack.enter_context, serving))
        if identity is not None:
            tasks.append(asyncio.create_task(_keep_renewed(identity, options.source), name="certificate"))
        yield agent
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(stack.close)
        await asyncio.to_thread(agent.stop)
        await asyncio.to_thread(memory_stack.close)


def reporter_of(options: SyncOptions, name: str, identity: Identity | None) -> Reporter:
    """Who tells the service where this node stands: as `name`, or as its certificate says."""
    if "://" in options.source or not options.reports:
        return NoReports()
    from sync.pki.channel import CertifiedDialer, PlainDialer

    if identity is None:
        return GrpcReports(options.source, lambda: name, PlainDialer())
    return GrpcReports(options.source, lambda: identity.current().facts.name, CertifiedDialer(identity))


def _identity(options: SyncOptions) -> Identity | None:
    if options.identity is None:
        return None
    from sync.pki.identity import Identity

    return Identity(Path(options.identity), None if options.ca is None else Path(options.ca))


async def _keep_renewed(identity: Identity, address: str) -> None:
    from sync.pki.channel import renew
    from sync.pki.identity import keep_renewed

    await keep_renewed(identity, lambda one: renew(one, address))
