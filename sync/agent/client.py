"""The agent's gRPC client: a `Source` with deadlines, a rate limit and a floor. Owns the channel.

Synchronous, used from one thread; `close` from any. A connection that broke is never used again: the next call opens
another, at once. How long to wait before that is the caller's matter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import grpc

from common.errors import FetchError, SlowSource
from sync.agent.answers import parts, request
from sync.agent.pace import Bucket, Floor, Grain
from sync.agent.ports import Part, Range, never
from sync.agent.ranges import joined
from sync.agent.reading import Reading
from sync.pki.channel import Dialer, PlainDialer, eavesdropper
from sync.proto import sync_pb2, sync_pb2_grpc

FLOOR_BYTES_S: Final = 512.0
FLOOR_WINDOW_S: Final = 20.0

_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel waits as long as the broken one would have
)
# What was received but not yet read is lost when a connection breaks: on a bad link little may be on its way.
_SMALL_WINDOW: Final = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 << 10))
_PERMANENT: Final = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


class GrpcSource:
    """Reads from a sync service at `address` (host:port). Each call ends within `timeout_s`.

    `rate_bytes_s` limits everything that is read here. A service that sends less than `floor_bytes_s` over
    `floor_window_s` is given up with `SlowSource`.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        rate_bytes_s: float | None = None,
        floor_bytes_s: float = FLOOR_BYTES_S,
        floor_window_s: float = FLOOR_WINDOW_S,
        dialer: Dialer | None = None,
    ) -> None:
        self._dialer = dialer or PlainDialer()
        self._address, self._timeout_s = address, timeout_s
        self._floor_bytes_s, self._floor_window_s = floor_bytes_s, floor_window_s
        self._bucket, self._grain = None if rate_bytes_s is None else Bucket(rate_bytes_s), Grain(rate_bytes_s)
        self._lock, self._is_closed = threading.Lock(), False
        self._channel: grpc.Channel | None = None
        self._has_small_window, self._is_limited = False, rate_bytes_s is not None

    def read(self, name: str) -> Iterator[bytes]:
        with self._reading("Metadata", sync_pb2.MetadataRequest(name=name), name) as chunks:
            for chunk in chunks:
                yield chunk.data

    def stream(self, ranges: Sequence[Range], *, cancelled: Callable[[], bool] = never) -> Iterator[Part]:
        groups = joined(ranges)
        with self._reading("Fetch", request(groups, self._grain.piece_bytes), "slabs", cancelled) as pieces:
            for part in parts(groups, iter(pieces)):
                self._grain.came(len(part.data))
                yield part

    def fetch(self, ranges: Sequence[Range]) -> Iterator[bytes | None]:
        data = bytearray()
        for part in self.stream(ranges):
            data += part.data
            if part.is_last:
                yield None if part.is_missing else bytes(data)
                data.clear()

    def dial(self, within_s: float) -> None:
        """Connects, where that is not so yet. Raises `FetchError` when it takes longer."""
        ready = grpc.channel_ready_future(self._open("a connection"))
        try:
            ready.result(timeout=within_s)
        except grpc.FutureTimeoutError as exc:
            ready.cancel()
            self._drop()
            raise FetchError("a connection", f"{self._address} did not answer within {within_s:g} s") from exc

    def close(self) -> None:
        """A call that is running breaks off."""
        with self._lock:
            self._is_closed = True
        self._drop()

    @contextlib.contextmanager
    def _reading(
        self, method: str, message: Any, what: str, cancelled: Callable[[], bool] = never
    ) -> Iterator[Iterator[Any]]:
        """The messages of one call."""
        floor = Floor(self._floor_bytes_s, self._floor_window_s)
        call = self._call(method, message, what)
        try:
            with Reading(
                call, what=what, size=_bytes_of, floor=floor, bucket=self._bucket, cancelled=cancelled
            ) as messages:
                yield iter(messages)
        except SlowSource:
            self._drop()
            raise
        except grpc.RpcError as exc:
            error = self._error(what, exc)
            if not error.is_permanent:
                self._grain.broke()
                self._drop()
            raise error from exc

    def _call(self, method: str, message: Any, what: str) -> Any:
        try:
            return getattr(sync_pb2_grpc.SyncStub(self._open(what)), method)(message, timeout=self._timeout_s)
        except ValueError as exc:  # what a channel says that was closed just now
            raise FetchError(what, f"the connection to {self._address} is closed") from exc

    def _open(self, what: str) -> grpc.Channel:
        """On the connection that is open, or on a new one where it does not suit the link any more."""
        wants_small = self._is_limited or not self._grain.is_coarse
        is_other = self._has_small_window != wants_small or self._dialer.is_stale()
        if self._channel is not None and is_other:
            self._drop()
        with self._lock:
            if self._is_closed:
                raise FetchError(what, "the source is closed")
            if self._channel is None:
                self._channel = self._connect((*_OPTIONS, *(_SMALL_WINDOW if wants_small else ())))
                self._has_small_window = wants_small
            return self._channel

    def _connect(self, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        return self._dialer.connect(self._address, options)

    def _drop(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _error(self, what: str, exc: grpc.RpcError) -> FetchError:
        code = exc.code()
        if (found := eavesdropper(what, self._address, exc.details())) is not None:
            return found
        problem = f"{code.name} from {self._address}: {exc.details()}"
        if isinstance(self._dialer, PlainDialer) and "Socket closed" in (exc.details() or ""):
            problem += "; a service that speaks TLS wants an identity (`outrider sync enrol`)"
        return FetchError(what, problem, is_permanent=code in _PERMANENT)


def _bytes_of(message: Any) -> int:
    return len(message.data)
