"""The sync service: hands out signed files, slabs and packs over gRPC, keeps online signatures fresh, hints at news.

It reads a store that publishers write (it looks at timestamp.json itself, twice a second) and is trusted with nothing
but, where the keys are given to it, the online roles. It serves all the same when the broker is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import grpc

from common.clock import SystemClock
from common.errors import ConfigError, OutriderError, StoreBusy
from sync.hints import Announcer
from sync.proto import sync_pb2, sync_pb2_grpc
from sync.store import TIMESTAMP, Store
from sync.trust.keys import Keys
from sync.trust.repository import Lives, Repository
from sync.trust.status import RoleStatus, role_status

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 256 << 10
WATCH_S: Final = 0.5
RENEW_S: Final = 60.0
MAX_RANGES: Final = 4096  # in one call, and what they may come to
MAX_BYTES: Final = 128 << 20
_READ_BYTES: Final = 1 << 20
_READERS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """`outrider sync serve`'s settings; all of it loopback and no broker by default."""

    store: str  # the folder that `outrider publish` writes
    # folder with at least the online keys: signatures are renewed here; none: they are not
    keys: str | None = None
    host: str = "127.0.0.1"  # address to bind; only loopback keeps other machines out
    port: int = 0  # 0..65535: gRPC; 0: any free port
    broker: str | None = None  # host:port of an MQTT broker for hints; none: nodes poll
    group: str = "default"  # the nodes that hear the hints: those with the same group
    spread_ms: int = 0  # 0..86400000: window over which nodes spread their polls after a hint
    name: str = "sync"  # its name in the endpoint file and in the log

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be 0..65535, got {self.port}")
        if not 0 <= self.spread_ms <= 86_400_000:
            raise ValueError(f"spread_ms must be 0..86400000, got {self.spread_ms}")
        if self.broker is not None and not self.broker.rpartition(":")[2].isdigit():
            raise ValueError(f"broker must be host:port, got {self.broker!r}")


class Hints(Protocol):
    """Where changes are announced: an `Announcer`, or nobody."""

    def announce(self, timestamp: bytes) -> None: ...
    async def run(self) -> None: ...


class NoHints:
    """There is no broker: nodes find out by polling."""

    def announce(self, timestamp: bytes) -> None:
        pass

    async def run(self) -> None:
        pass


@contextlib.asynccontextmanager
async def service(config: ServiceConfig, *, drain_s: float = 2.0) -> AsyncIterator[str]:
    """A running service; yields its gRPC address, host:port. Running calls get `drain_s` to end."""
    store = Store(Path(config.store))
    hints = NoHints() if config.broker is None else _announcer(config, config.broker)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="sync-store") as readers:
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        sync_pb2_grpc.add_SyncServicer_to_server(_Servicer(store, readers), server)
        port = _bind(server, config)
        await server.start()
        keys = Keys(Path(config.keys or config.store))  # without a folder of keys only to read what is signed
        repository = Repository(store, keys)
        loops = [_watch(store, hints, readers), hints.run(), _alarm(repository, readers)]
        if config.keys is not None:
            loops.append(_renew(repository, store, readers))
        try:
            async with _tasks(loops):
                yield f"{config.host}:{port}"
        finally:
            await server.stop(drain_s)


def _bind(server: Any, config: ServiceConfig) -> int:
    address = f"{config.host}:{config.port}"
    try:
        return int(server.add_insecure_port(address))
    except RuntimeError as exc:
        problem = f"{address} cannot be bound: {_why_not(config)}"
        raise ConfigError("sync service", "port", problem, "a free port, or 0") from exc


def _why_not(config: ServiceConfig) -> str:
    """gRPC keeps the cause to itself: asking the system once more tells it."""
    try:
        with socket.create_server((config.host, config.port)):
            return "it was taken until now"
    except OSError as exc:
        return exc.strerror or str(exc)


class _Servicer(sync_pb2_grpc.SyncServicer):
    """Parses, reads from the store, cuts into pieces. Disk reads happen in `readers`."""

    def __init__(self, store: Store, readers: ThreadPoolExecutor) -> None:
        self._store, self._readers = store, readers

    async def Metadata(  # noqa: N802  # the method's name in the proto
        self, request: sync_pb2.MetadataRequest, context: Any
    ) -> AsyncIterator[sync_pb2.MetadataChunk]:
        data = await _in(self._readers, self._store.read, request.name)
        if data is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no file {request.name!r}")
        for at in range(0, len(data), CHUNK_BYTES):
            yield sync_pb2.MetadataChunk(data=data[at : at + CHUNK_BYTES])

    async def Fetch(  # noqa: N802
        self, request: sync_pb2.FetchRequest, context: Any
    ) -> AsyncIterator[sync_pb2.Piece]:
        problem = f"at most {MAX_RANGES} ranges and {MAX_BYTES} bytes in one call"
        if len(request.ranges) > MAX_RANGES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        left = MAX_BYTES
        for number, one in enumerate(request.ranges):
            async for piece in self._range(number, one):
                left -= len(piece.data)
                if left < 0:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
                yield piece

    async def _range(self, number: int, one: sync_pb2.Range) -> AsyncIterator[sync_pb2.Piece]:
        """What the file has of a range, in pieces; one without data where that is nothing."""
        at, end = one.offset, one.offset + one.length if one.length else sys.maxsize
        while True:
            part = await _in(self._readers, self._store.part, one.name, at, min(_READ_BYTES, end - at))
            size, data = (0, b"") if part is None else part
            for start in range(0, len(data) or 1, CHUNK_BYTES):
                yield sync_pb2.Piece(
                    range=number,
                    file_bytes=size,
                    offset=at + start,
                    data=data[start : start + CHUNK_BYTES],
                    is_missing=part is None,
                )
            at += len(data)
            if not data or at >= min(end, size):
                return


def _announcer(config: ServiceConfig, broker: str) -> Announcer:
    return Announcer(broker, group=config.group, spread_ms=config.spread_ms)


async def _watch(store: Store, hints: Hints, readers: ThreadPoolExecutor) -> None:
    """Announces each new timestamp."""
    last: bytes | None = None
    while True:
        try:
            timestamp = await _in(readers, store.read, TIMESTAMP)
        except OSError as exc:
            logger.error("the store cannot be read: %s", exc)
            timestamp = None
        if timestamp is not None and timestamp != last:
            last = timestamp
            hints.announce(timestamp)
        await asyncio.sleep(WATCH_S)


async def _renew(repository: Repository, store: Store, readers: ThreadPoolExecutor) -> None:
    """Signs the online roles again in time. A failure is logged and tried again: old signatures are good for days."""

    def renew() -> bool:
        with store.lock(0.0):
            return repository.renew()

    while True:
        try:
            if await _in(readers, renew):
                logger.info("online metadata was signed again")
        except StoreBusy:
            logger.info("a publisher is at work, which signs again itself")
        except (OutriderError, OSError) as exc:
            logger.error("online metadata cannot be signed again: %s", exc)
        await asyncio.sleep(RENEW_S)


async def _alarm(repository: Repository, readers: ThreadPoolExecutor) -> None:
    """Says once when a role is past half of its life: whoever signs it by hand still has the other half."""

    def status() -> tuple[RoleStatus, ...]:
        return role_status(repository, None, SystemClock().now(), lives=Lives())

    said: set[str] = set()
    while True:
        found: tuple[RoleStatus, ...] = ()
        with contextlib.suppress(OutriderError, OSError):  # an empty store, or one that cannot be read: said elsewhere
            found = await _in(readers, status)
        due = {one.role: one for one in found if one.is_due}
        for role in due.keys() - said:
            state = "has expired" if due[role].is_expired else "is past half of its life"
            logger.warning("role %r %s: its signature holds until %s", role, state, due[role].expires.isoformat())
        said = set(due)
        await asyncio.sleep(RENEW_S)


async def _in(readers: ThreadPoolExecutor, read: Any, *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(readers, read, *args)


@contextlib.asynccontextmanager
async def _tasks(loops: Sequence[Awaitable[None]]) -> AsyncIterator[None]:
    """Runs endless loops beside the block and cancels them after it."""
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    for task in tasks:
        task.add_done_callback(_log_crash)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_crash(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a background loop of the sync service ended", exc_info=task.exception())
