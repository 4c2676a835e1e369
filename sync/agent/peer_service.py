"""What a node gives to its peers: slabs of its installed releases, hashed as they are read, by their ids alone.

Whoever asks has to know a slab's id, which is in the signed manifest of its release. A busy node says so and is left
alone: serving peers never gets in the way of its own work for long.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc

from common.errors import ConfigError
from sync.agent.journal import Release
from sync.agent.local import LocalSlabs
from sync.agent.peers import FOLDER
from sync.proto import sync_pb2, sync_pb2_grpc

MAX_RANGES: Final = 4096
MAX_BYTES: Final = 128 << 20
_PIECE_BYTES: Final = 64 << 10
_CALLS: Final = 2  # at a time; more are refused

Installed = Sequence[tuple[Release, Path]]  # releases, and where their files are


@contextlib.contextmanager
def peer_service(address: str, installed: Callable[[], Installed]) -> Iterator[str]:
    """Serves at `address` (host:port; port 0: any) what `installed` says at each call; yields host:port.

    Raises `ConfigError` where that cannot be bound.
    """
    with ThreadPoolExecutor(_CALLS, thread_name_prefix="sync-peers") as pool:
        server = grpc.server(pool, maximum_concurrent_rpcs=_CALLS, options=(("grpc.so_reuseport", 0),))
        servicer = _Servicer(installed)
        sync_pb2_grpc.add_SyncServicer_to_server(servicer, server)
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as exc:
            raise ConfigError("peers", "address", f"{address} cannot be bound", "a free port, or 0") from exc
        server.start()
        try:
            yield f"{address.rpartition(':')[0]}:{port}"
        finally:
            server.stop(None).wait()
            servicer.close()


class _Servicer(sync_pb2_grpc.SyncServicer):
    def __init__(self, installed: Callable[[], Installed]) -> None:
        self._installed, self._lock = installed, threading.Lock()
        self._known: frozenset[tuple[str, Path]] = frozenset()
        self._local = LocalSlabs(())

    def Fetch(  # noqa: N802  # the method's name in the proto
        self, request: sync_pb2.FetchRequest, context: Any
    ) -> Iterator[sync_pb2.Piece]:
        if len(request.ranges) > MAX_RANGES or sum(one.length for one in request.ranges) > MAX_BYTES:
            problem = f"at most {MAX_RANGES} ranges and {MAX_BYTES} bytes in one call"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        most = max(1024, min(request.piece_bytes or _PIECE_BYTES, _PIECE_BYTES))
        self._refresh()
        for number, one in enumerate(request.ranges):
            yield from _pieces(number, one, self._raw(one.name), most)

    def close(self) -> None:
        with self._lock:
            self._local.close()

    def _refresh(self) -> None:
        installed = self._installed()
        known = frozenset((release.manifest.digest() + release.plan, folder) for release, folder in installed)
        with self._lock:
            if known != self._known:
                self._local.close()
                self._known, self._local = known, LocalSlabs(installed)

    def _raw(self, name: str) -> bytes | None:
        folder, _, slab = name.partition("/")
        with self._lock:
            return self._local.read(slab) if folder == FOLDER else None


def _pieces(number: int, one: sync_pb2.Range, raw: bytes | None, most: int) -> Iterator[sync_pb2.Piece]:
    size = 0 if raw is None else len(raw)
    end = min(size, one.offset + one.length) if one.length else size
    for at in range(one.offset, max(end, one.offset + 1), most):
        data = b"" if raw is None else raw[at : min(at + most, end)]
        yield sync_pb2.Piece(range=number, file_bytes=size, offset=at, data=data, is_missing=raw is None)
