"""The agent's gRPC client: a `Source` with deadlines. Owns the channel; synchronous, used from one thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import grpc

from common.errors import FetchError
from sync.agent.ports import Want
from sync.codec import max_object_bytes
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

    def fetch(self, wants: Sequence[Want]) -> Iterator[tuple[str, bytes]]:
        call = self._stub.Fetch(_request(wants), timeout=self._timeout_s)
        try:
            pieces = iter(call)
            for want in wants:
                yield want.id, _object(want, pieces)
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


def _request(wants: Sequence[Want]) -> sync_pb2.FetchRequest:
    return sync_pb2.FetchRequest(
        wants=[
            sync_pb2.Want(id=bytes.fromhex(want.id), bases=[bytes.fromhex(base) for base in want.bases])
            for want in wants
        ]
    )


def _object(want: Want, pieces: Iterator[sync_pb2.Piece]) -> bytes:
    """One object, from consecutive pieces: never longer than an object of this slab can be."""
    data, size = bytearray(), -1
    while size < 0 or len(data) < size:
        piece = next(pieces, None)
        if piece is None:
            raise FetchError(f"slab {want.id}", "the answer ended early")
        size = piece.object_bytes if size < 0 else size
        if piece.id.hex() != want.id or piece.offset != len(data) or piece.object_bytes != size or not piece.data:
            raise FetchError(f"slab {want.id}", "the answer is out of order")
        data += piece.data
        if max(size, len(data)) > max_object_bytes(want.length):
            raise FetchError(f"slab {want.id}", f"endless data: {size} bytes announced for {want.length} raw")
    return bytes(data)
