"""The agent's gRPC client: a `Source` with deadlines. Owns the channel; synchronous, used from one thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import grpc

from common.errors import FetchError
from sync.agent.ports import Range
from sync.proto import sync_pb2, sync_pb2_grpc

_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
_PERMANENT: Final = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


class GrpcSource:
    """Reads from a sync service at `address` (host:port). Each call ends within `timeout_s`."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub = sync_pb2_grpc.SyncStub(self._channel)

    def read(self, name: str) -> Iterator[bytes]:
        call = self._stub.Metadata(sync_pb2.MetadataRequest(name=name), timeout=self._timeout_s)
        try:
            for chunk in call:
                yield chunk.data
        except grpc.RpcError as exc:
            raise self._error(name, exc) from exc
        finally:
            call.cancel()

    def fetch(self, ranges: Sequence[Range]) -> Iterator[bytes | None]:
        joined = _joined(ranges)
        call = self._stub.Fetch(_request(joined), timeout=self._timeout_s)
        try:
            pieces = iter(call)
            for number, group in enumerate(joined):
                yield from _answers(number, group, pieces)
        except grpc.RpcError as exc:
            raise self._error("slabs", exc) from exc
        finally:
            call.cancel()

    def close(self) -> None:
        self._channel.close()

    def _error(self, what: str, exc: grpc.RpcError) -> FetchError:
        code = exc.code()
        problem = f"{code.name} from {self._address}: {exc.details()}"
        return FetchError(what, problem, is_permanent=code in _PERMANENT)


def _joined(ranges: Sequence[Range]) -> list[list[Range]]:
    """Ranges that follow one another in a file, together: they travel as one."""
    groups: list[list[Range]] = []
    for one in ranges:
        last = groups[-1][-1] if groups else None
        if last and last.length and one.length and (last.name, last.offset + last.length) == (one.name, one.offset):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _request(joined: Sequence[Sequence[Range]]) -> sync_pb2.FetchRequest:
    return sync_pb2.FetchRequest(
        ranges=[
            sync_pb2.Range(name=group[0].name, offset=group[0].offset, length=sum(one.length for one in group))
            for group in joined
        ]
    )


def _answers(number: int, group: Sequence[Range], pieces: Iterator[sync_pb2.Piece]) -> Iterator[bytes | None]:
    """What came for the ranges of one group; not more than one of them is in memory."""
    stream = _Stream(number, group, pieces)
    for one in group:
        yield stream.take(one)
    stream.drain()


class _Stream:
    """The answer to one range of the request: pieces that follow one another, and not more than was asked for."""

    def __init__(self, number: int, group: Sequence[Range], pieces: Iterator[sync_pb2.Piece]) -> None:
        self._number, self._pieces = number, pieces
        self._name, self._at = group[0].name, group[0].offset
        first = self._next()
        self._file_bytes, self._data = int(first.file_bytes), bytearray()
        self._is_missing, limit = bool(first.is_missing), sum(one.length for one in group)
        if not self._is_missing and not limit and self._file_bytes > group[0].limit:
            problem = f"endless data: {self._file_bytes} bytes announced, at most {group[0].limit} make sense"
            raise FetchError(self._name, problem, is_permanent=True)
        end = min(self._file_bytes, self._at + limit) if limit else self._file_bytes
        self._end = self._at if self._is_missing else max(self._at, end)
        self._accept(first)

    def take(self, one: Range) -> bytes | None:
        """The next range; None where the file does not have all of it."""
        end = one.offset + one.length if one.length else self._file_bytes
        if self._is_missing or end > self._end:
            return None
        length = end - one.offset
        while len(self._data) < length:
            self._accept(self._next())
        data = bytes(self._data[:length])
        del self._data[:length]
        return data

    def drain(self) -> None:
        """The part of a range that the file does not have in full."""
        while self._at < self._end:
            self._accept(self._next())
            self._data.clear()

    def _next(self) -> sync_pb2.Piece:
        piece = next(self._pieces, None)
        if piece is None:
            raise FetchError(self._name, "the answer ended early")
        return piece

    def _accept(self, piece: sync_pb2.Piece) -> None:
        is_next = (piece.range, piece.offset, piece.file_bytes) == (self._number, self._at, self._file_bytes)
        left = self._end - self._at
        if not is_next or not min(left, 1) <= len(piece.data) <= left:
            raise FetchError(self._name, "the answer is out of order")
        self._at += len(piece.data)
        self._data += piece.data
