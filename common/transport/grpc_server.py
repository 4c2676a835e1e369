"""The Open Inference Protocol over gRPC for a data plane, on TCP and a Unix socket.

Thin: a handler parses, calls, renders. Errors become the code of `status.py` in one wrapper; a cancelled call or one
whose deadline has passed cancels its handler, and with it the call below.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from common.serving.catalog import ModelState
from common.serving.dataplane import DataPlane
from common.transport import oip, oip_grpc
from common.transport.headers import REQUEST_ID, Said, joined, read_context, write_stamp
from common.transport.listen import DRAIN_S, MAX_BODY_BYTES, Listening, cannot_listen
from common.transport.proto import oip_pb2 as pb
from common.transport.status import status_of

_log = logging.getLogger(__name__)
_NO_DEADLINE_S = 10 * 365 * 86400.0  # gRPC says "none" as a very far one

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    ("grpc.max_send_message_length", MAX_BODY_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a silent share
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),  # our clients ask every two seconds
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 10_000),  # clients that vanished hold no call for longer
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
)

Method = Callable[[Any, Any], Awaitable[Any]]


@contextlib.asynccontextmanager
async def serve_grpc(
    dataplane: DataPlane,
    *,
    host: str = "127.0.0.1",
    port: int | None = 0,
    uds: Path | None = None,
    trusts_reason: bool = False,
    drain_s: float = DRAIN_S,
) -> AsyncIterator[Listening]:
    """Serves until the context is left, then waits up to `drain_s` for the calls in progress.

    `port` None: no TCP. `trusts_reason`: callers are our own processes, whose word on why a request left the edge
    counts. Raises `ConfigError` when an address cannot be had.
    """
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((_handlers(_Service(dataplane, trusts_reason)),))
    addresses: list[str] = []
    bound = 0
    if port is not None:
        name = f"[{host}]" if ":" in host else host
        bound = _bind(server, f"{name}:{port}")
        addresses.append(f"{name}:{bound}")
    if uds is not None:
        _bind(server, f"unix:{uds}")
        addresses.append(f"unix:{uds}")
    await server.start()
    try:
        yield Listening(port=bound, addresses=tuple(addresses))
    finally:
        await server.stop(drain_s)


class _Service:
    def __init__(self, dataplane: DataPlane, trusts_reason: bool) -> None:
        self._dataplane, self._trusts_reason = dataplane, trusts_reason

    async def live(self, _request: Any, _call: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def ready(self, _request: Any, _call: Any) -> Any:
        return pb.ServerReadyResponse(ready=self._dataplane.is_ready())

    async def server(self, _request: Any, _call: Any) -> Any:
        return pb.ServerMetadataResponse(
            name=self._dataplane.name, version=oip.server_version(), extensions=oip.EXTENSIONS
        )

    async def model_ready(self, request: Any, _call: Any) -> Any:
        is_ready = await self._dataplane.catalog.is_model_ready(request.name, request.version or None)
        return pb.ModelReadyResponse(ready=is_ready)

    async def model(self, request: Any, _call: Any) -> Any:
        metadata = await self._dataplane.catalog.metadata(request.name, request.version or None)
        return oip_grpc.render_metadata(metadata)

    async def infer(self, request: Any, call: Any) -> Any:
        body = oip_grpc.parse_infer(request)
        said = Said(
            id=body.id, version=request.model_version, parameters=body.parameters, remaining_s=_remaining_s(call)
        )
        context = read_context(_metadata(call), said, time.monotonic(), trusts_reason=self._trusts_reason)
        response = await self._dataplane.infer(body.request(request.model_name, context))
        call.set_trailing_metadata(tuple((write_stamp(response.stamp) | {REQUEST_ID: context.id}).items()))
        return oip_grpc.render_infer(response, body.id)

    async def index(self, request: Any, _call: Any) -> Any:
        index = await self._dataplane.catalog.index()
        return oip_grpc.render_index(m for m in index if not request.ready or m.state is ModelState.READY)

    async def load(self, request: Any, _call: Any) -> Any:
        oip.refuse_load_parameters(request.parameters)
        await self._dataplane.load(request.model_name)
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: Any, _call: Any) -> Any:
        await self._dataplane.catalog.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()


# The protocol's method, what takes it here, its request message.
_METHODS: tuple[tuple[str, str, Any], ...] = (
    ("ServerLive", "live", pb.ServerLiveRequest),
    ("ServerReady", "ready", pb.ServerReadyRequest),
    ("ServerMetadata", "server", pb.ServerMetadataRequest),
    ("ModelReady", "model_ready", pb.ModelReadyRequest),
    ("ModelMetadata", "model", pb.ModelMetadataRequest),
    ("ModelInfer", "infer", pb.ModelInferRequest),
    ("RepositoryIndex", "index", pb.RepositoryIndexRequest),
    ("RepositoryModelLoad", "load", pb.RepositoryModelLoadRequest),
    ("RepositoryModelUnload", "unload", pb.RepositoryModelUnloadRequest),
)


def _handlers(service: _Service) -> Any:
    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            _errors_as_codes(name, kind, getattr(service, own)),
            response_serializer=lambda message: message.SerializeToString(),
        )
        for name, own, kind in _METHODS
    }
    return grpc.method_handlers_generic_handler(oip_grpc.SERVICE, methods)


def _errors_as_codes(name: str, kind: Any, method: Method) -> Method:
    async def handle(data: bytes, call: Any) -> Any:
        try:
            return await method(oip_grpc.parse_message(kind, data), call)
        except Exception as exc:
            status = status_of(exc)
            if not status.is_ours:
                _log.exception("%s failed", name)
        return await call.abort(status.grpc, status.text, tuple(status.headers.items()))

    return handle


def _metadata(call: Any) -> dict[str, str]:
    return joined((name, value) for name, value in call.invocation_metadata() or () if isinstance(value, str))


def _remaining_s(call: Any) -> float:
    remaining = call.time_remaining()
    return remaining if remaining is not None and remaining < _NO_DEADLINE_S else math.inf


def _bind(server: Any, address: str) -> int:
    try:
        port = int(server.add_insecure_port(address))
    except RuntimeError as exc:
        raise cannot_listen("grpc", address, exc) from exc
    if port == 0:
        raise cannot_listen("grpc", address, OSError("refused"))
    return port
