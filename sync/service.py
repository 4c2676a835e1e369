"""The sync service: hands out signed files, slabs and packs over gRPC, keeps online signatures fresh, hints at news.

It reads a store that publishers write (it looks at timestamp.json itself, in a folder twice a second) and is trusted
with nothing but, where the keys are given to it, the online roles. It serves all the same when the broker is away.
With a CA it is TLS, for callers with certificates (sync/pki/).
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
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import grpc

from common.clock import SystemClock
from common.errors import BucketError, ConfigError, OutriderError, StoreBusy
from sync.fleet import DATABASE, MAX_MODELS, Fleet, ModelReport, problem_of
from sync.hints import Announcer
from sync.pki.authority import SERVICE, Authority, names_of
from sync.pki.door import CertifiedDoor, Door, OpenDoor, check_exposure
from sync.pki.enrolment import enrolment, renewed
from sync.pki.identity import Identity
from sync.proto import sync_pb2, sync_pb2_grpc
from sync.store import TIMESTAMP
from sync.store.stores import AnyStore, open_store
from sync.trust.keys import Keys
from sync.trust.repository import Lives, Repository
from sync.trust.status import RoleStatus, role_status

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 256 << 10
MIN_CHUNK_BYTES: Final = 1 << 10  # smaller ones would be more frame than data
RENEW_S: Final = 60.0
MAX_RANGES: Final = 4096  # in one call, and what they may come to
MAX_BYTES: Final = 128 << 20
_MAX_EPOCH: Final = (1 << 63) - 1  # what a database takes
_READ_BYTES: Final = 1 << 20
_READERS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """`outrider sync serve`'s settings; all of it loopback and no broker by default."""

    store: str  # what `outrider publish` writes: a folder, or s3://bucket/prefix
    # folder with at least the online keys: signatures are renewed here; none: they are not
    keys: str | None = None
    host: str = "127.0.0.1"  # address to bind; only loopback keeps other machines out
    port: int = 0  # 0..65535: gRPC; 0: any free port
    broker: str | None = None  # host:port of an MQTT broker for hints, over TLS where there is a ca; none: nodes poll
    group: str = "default"  # the nodes that hear the hints: those with the same group
    spread_ms: int = 0  # 0..86400000: window over which nodes spread their polls after a hint
    name: str = "sync"  # its name in the endpoint file and in the log
    # folder of the CA (`outrider sync ca init`): TLS, and only callers with its certificates; none: plain
    ca: str | None = None
    dns: tuple[str, ...] = ()  # further names and addresses of this service, for its certificate; only with ca
    # 0..65535: where a device trades its token for a first certificate; 0: any free port; none: nowhere; only with ca
    enrol_port: int | None = None
    certificate_days: float = 7.0  # 0.01..365: life of nodes' certificates; they renew at two thirds
    insecure: bool = False  # whether other machines may be served without TLS: on a private network
    state: str | None = None  # folder for what nodes report (`outrider sync fleet`); none: it is forgotten

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be 0..65535, got {self.port}")
        if not 0 <= self.spread_ms <= 86_400_000:
            raise ValueError(f"spread_ms must be 0..86400000, got {self.spread_ms}")
        if self.broker is not None and not self.broker.rpartition(":")[2].isdigit():
            raise ValueError(f"broker must be host:port, got {self.broker!r}")
        if not 0.01 <= self.certificate_days <= 365:
            raise ValueError(f"certificate_days must be 0.01..365, got {self.certificate_days}")
        if self.enrol_port is not None and not 0 <= self.enrol_port <= 65535:
            raise ValueError(f"enrol_port must be 0..65535, got {self.enrol_port}")
        if self.ca is None and (self.enrol_port is not None or self.dns):
            raise ValueError("enrol_port and dns belong to TLS: they need ca, the folder of a CA")
        check_exposure(self.host, is_certified=self.ca is not None, is_insecure=self.insecure)


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
    store = open_store(config.store)
    authority = None if config.ca is None else _authority(config, config.ca)
    door = OpenDoor() if authority is None else CertifiedDoor(authority, SERVICE, names_of(config.host, config.dns))
    hints = NoHints() if config.broker is None else _announcer(config, config.broker, authority)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="sync-store") as readers:
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        fleet = Fleet(None if config.state is None else Path(config.state) / DATABASE)
        sync_pb2_grpc.add_SyncServicer_to_server(_Servicer(store, readers, door, authority, fleet), server)
        port = _bind(door, server, config)
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
            fleet.close()


@contextlib.asynccontextmanager
async def enrolling(config: ServiceConfig) -> AsyncIterator[str | None]:
    """The port for devices without a certificate, if the settings have one; yields its address."""
    if config.ca is None or config.enrol_port is None:
        yield None
        return
    authority = _authority(config, config.ca)
    door = CertifiedDoor(authority, SERVICE, names_of(config.host, config.dns), asks_callers=False)
    async with contextlib.AsyncExitStack() as stack:
        try:
            address = await stack.enter_async_context(enrolment(authority, door, config.host, config.enrol_port))
        except RuntimeError as exc:
            problem = f"{config.host}:{config.enrol_port} cannot be bound: {_why_not(config.host, config.enrol_port)}"
            raise ConfigError("sync service", "enrol_port", problem, "a free port, or 0") from exc
        yield address


def _authority(config: ServiceConfig, folder: str) -> Authority:
    return Authority(Path(folder), node_life=timedelta(days=config.certificate_days))


def _bind(door: Door, server: Any, config: ServiceConfig) -> int:
    address = f"{config.host}:{config.port}"
    try:
        return door.bind(server, address)
    except RuntimeError as exc:
        problem = f"{address} cannot be bound: {_why_not(config.host, config.port)}"
        raise ConfigError("sync service", "port", problem, "a free port, or 0") from exc


def _why_not(host: str, port: int) -> str:
    """gRPC keeps the cause to itself: asking the system once more tells it."""
    try:
        with socket.create_server((host, port)):
            return "it was taken until now"
    except OSError as exc:
        return exc.strerror or str(exc)


class _Servicer(sync_pb2_grpc.SyncServicer):
    """Parses, reads from the store, cuts into pieces. Disk reads happen in `readers`."""

    def __init__(
        self,
        store: AnyStore,
        readers: ThreadPoolExecutor,
        door: Door,
        authority: Authority | None,
        fleet: Fleet,
    ) -> None:
        self._store, self._readers, self._door = store, readers, door
        self._authority, self._fleet = authority, fleet

    async def Metadata(  # noqa: N802  # the method's name in the proto
        self, request: sync_pb2.MetadataRequest, context: Any
    ) -> AsyncIterator[sync_pb2.MetadataChunk]:
        await self._door.admit(context)
        data = await self._of_store(context, self._store.read, request.name)
        if data is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no file {request.name!r}")
        for at in range(0, len(data), CHUNK_BYTES):
            yield sync_pb2.MetadataChunk(data=data[at : at + CHUNK_BYTES])

    async def Fetch(  # noqa: N802
        self, request: sync_pb2.FetchRequest, context: Any
    ) -> AsyncIterator[sync_pb2.Piece]:
        await self._door.admit(context)
        problem = f"at most {MAX_RANGES} ranges and {MAX_BYTES} bytes in one call"
        if len(request.ranges) > MAX_RANGES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        left, most = MAX_BYTES, max(MIN_CHUNK_BYTES, min(request.piece_bytes or CHUNK_BYTES, CHUNK_BYTES))
        for number, one in enumerate(request.ranges):
            await self._door.admit(context)  # it may be revoked meanwhile
            async for piece in self._range(number, one, most, context):
                left -= len(piece.data)
                if left < 0:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
                yield piece

    async def Report(self, request: sync_pb2.ReportRequest, context: Any) -> sync_pb2.ReportAnswer:  # noqa: N802
        peer = await self._door.admit(context)
        if peer is not None and peer.facts.name != request.node:
            problem = f"the certificate is {peer.facts.name!r}'s, the report {request.node!r}'s"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)
        models = [
            ModelReport(
                model=one.model,
                state=one.state,
                code=one.code,
                reason=one.reason,
                version=one.version,
                active=one.active,
                epoch=min(one.epoch, _MAX_EPOCH),
            )
            for one in request.models[: MAX_MODELS + 1]
        ]
        if (wrong := problem_of(request.node, models)) is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, wrong)
        await _in(self._readers, self._fleet.report, request.node, models, request.problem)
        return sync_pb2.ReportAnswer()

    async def Renew(self, request: sync_pb2.RenewRequest, context: Any) -> sync_pb2.Certificate:  # noqa: N802
        peer = await self._door.admit(context)
        if peer is None or self._authority is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this service has no CA")
            raise AssertionError("abort raises")
        return await renewed(self._authority, peer, request.request, context)

    async def _of_store(self, context: Any, read: Any, *args: Any) -> Any:
        try:
            return await _in(self._readers, read, *args)
        except (OSError, BucketError) as exc:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the store cannot be read: {exc}")

    async def _range(self, number: int, one: sync_pb2.Range, most: int, context: Any) -> AsyncIterator[sync_pb2.Piece]:
        """What the file has of a range, in pieces of at most `most` bytes; one without data where that is nothing."""
        at, end = one.offset, one.offset + one.length if one.length else sys.maxsize
        while True:
            part = await self._of_store(context, self._store.part, one.name, at, min(_READ_BYTES, end - at))
            size, data = (0, b"") if part is None else part
            for start in range(0, len(data) or 1, most):
                yield sync_pb2.Piece(
                    range=number,
                    file_bytes=size,
                    offset=at + start,
                    data=data[start : start + most],
                    is_missing=part is None,
                )
            at += len(data)
            if not data or at >= min(end, size):
                return


def _announcer(config: ServiceConfig, broker: str, authority: Authority | None) -> Announcer:
    identity = None
    if authority is not None:
        folder = authority.server(SERVICE, names_of(config.host, config.dns))
        identity = Identity(folder, authority.root_file)
    return Announcer(broker, group=config.group, spread_ms=config.spread_ms, identity=identity)


async def _watch(store: AnyStore, hints: Hints, readers: ThreadPoolExecutor) -> None:
    """Announces each new timestamp."""
    last: bytes | None = None
    while True:
        try:
            timestamp = await _in(readers, store.read, TIMESTAMP)
        except (OSError, BucketError) as exc:
            logger.error("the store cannot be read: %s", exc)
            timestamp = None
        if timestamp is not None and timestamp != last:
            last = timestamp
            hints.announce(timestamp)
        await asyncio.sleep(store.look_s)


async def _renew(repository: Repository, store: AnyStore, readers: ThreadPoolExecutor) -> None:
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
