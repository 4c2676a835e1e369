"""The Open Inference Protocol over gRPC for a data plane, on TCP and a Unix socket.

Thin: a handler parses, calls, renders. Errors become the code of `status.py` in one wrapper; a cancelled call or one
whose deadline has passed cancels its handler, and with it the call below.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import grpc

from common.errors import Unauthenticated
from common.serving.catalog import ModelState
from common.serving.dataplane import DataPlane
from common.serving.statistics import Statistics
from common.transport import oip, oip_grpc, oip_statistics
from common.transport.headers import REQUEST_ID, Said, joined, read_context, write_stamp
from common.transport.listen import DRAIN_S, MAX_BODY_BYTES, Listening, cannot_listen
from common.transport.off_loop import off_loop
from common.transport.proto import oip_pb2 as pb
from common.transport.sizes import is_long_answer, is_long_message
from common.transport.status import Status, status_of
from common.transport.tenants import CREDENTIALS, Caller, TenantOptions, Tenants, tenants_of
from common.transport.unix_socket import SocketFile, claim

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
    statistics: Statistics | None = None,
    tenants: Sequence[TenantOptions] = (),
    trusts_reason: bool = False,
    drain_s: float = DRAIN_S,
) -> AsyncIterator[Listening]:
    """Serves until the context is left, then waits up to `drain_s` for the calls in progress.

    `port` None: no TCP. `tenants`: whose keys are good. `trusts_reason`: callers that need no key are our own
    processes, whose word counts on a call's tenant and on why it left the edge. Raises `ConfigError` when an address
    cannot be had.
    """
    server = grpc.aio.server(options=OPTIONS)
    service = _Service(dataplane, tenants_of(tenants, trusts_callers=trusts_reason), statistics)
    server.add_generic_rpc_handlers((_handlers(service),))
    addresses: list[str] = []
    bound = 0
    if port is not None:
        name = f"[{host}]" if ":" in host else host
        bound = _bind(server, f"{name}:{port}")
        addresses.append(f"{name}:{bound}")
    file: SocketFile | None = None
    if uds is not None:
        file = claim("grpc", uds, lambda own: _bind(server, f"unix:{own}", f"unix:{uds}"))
        addresses.append(f"unix:{uds}")
    await server.start()
    try:
        yield Listening(port=bound, addresses=tuple(addresses))
    finally:
        if file is not None:
            file.remove()
        await server.stop(drain_s)


class _Service:
    def __init__(self, dataplane: DataPlane, tenants: Tenants, statistics: Statistics | None) -> None:
        self._dataplane, self._tenants, self._statistics = dataplane, tenants, statistics

    def caller(self, call: Any) -> Caller:
        """Raises `Unauthenticated`."""
        shown = {name: value for name, value in call.invocation_metadata() or () if name in CREDENTIALS}
        return self._tenants.caller(shown, is_local=call.peer().startswith("unix"))

    async def live(self, _request: Any, _call: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def ready(self, _request: Any, _call: Any) -> Any:
        return pb.ServerReadyResponse(ready=self._dataplane.is_ready())

    async def server(self, _request: Any, _call: Any) -> Any:
        return pb.ServerMetadataResponse(
            name=self._dataplane.name, version=oip.server_version(), extensions=oip.EXTENSIONS
        )

    async def model_ready(self, request: Any, _call: Any) -> Any:
        oip.check_model(request.name, request.version)
        is_ready = await self._dataplane.catalog.is_model_ready(request.name, request.version or None)
        return pb.ModelReadyResponse(ready=is_ready)

    async def model(self, request: Any, _call: Any) -> Any:
        oip.check_model(request.name, request.version)
        metadata = await self._dataplane.catalog.metadata(request.name, request.version or None)
        return oip_grpc.render_metadata(metadata)

    async def model_config(self, request: Any, _call: Any) -> Any:
        oip.check_model(request.name, request.version)
        metadata = await self._dataplane.catalog.metadata(request.name, request.version or None)
        return oip_grpc.render_config(metadata)

    async def statistics(self, request: Any, _call: Any) -> Any:
        oip.check_model(request.name, request.version)
        entries = await oip_statistics.read(
            self._dataplane.catalog, self._statistics, request.name, request.version or None
        )
        return oip_grpc.render_statistics(entries)

    async def infer(self, request: Any, call: Any) -> Any:
        answer, trailing = await self._answer(request, _metadata(call), self.caller(call), _remaining_s(call))
        call.set_trailing_metadata(tuple(trailing.items()))
        return answer

    async def stream_infer(self, messages: AsyncIterator[bytes], call: Any) -> AsyncIterator[Any]:
        """Each request in its turn, as if called alone. A failed one is an error message, and the stream goes on."""
        metadata = _metadata(call)
        metadata.pop(REQUEST_ID, None)  # it names the stream; each request has its own id
        try:
            caller = self.caller(call)
        except Unauthenticated as exc:
            await _abort(call, _status("ModelStreamInfer", exc))
        async for data in messages:
            request_id = ""
            try:
                request = oip_grpc.parse_message(pb.ModelInferRequest, data)
                request_id = request.id
                answer, _ = await self._answer(request, metadata, caller, _remaining_s(call))
                reply = oip_grpc.render_stream(answer)
            except Exception as exc:
                reply = oip_grpc.render_stream_error(_status("ModelStreamInfer", exc).text, request_id)
            yield reply

    async def _answer(
        self, request: Any, metadata: dict[str, str], caller: Caller, remaining_s: float
    ) -> tuple[Any, dict[str, str]]:
        """The answer to one infer request, and what goes beside it."""
        parse, render = oip_grpc.parse_infer, oip_grpc.render_infer
        body = await off_loop(parse, request) if is_long_message(request) else parse(request)
        said = Said(id=body.id, version=request.model_version, parameters=body.parameters, remaining_s=remaining_s)
        context = read_context(metadata, said, time.monotonic(), caller=caller)
        oip.check_model(request.model_name, context.pin or "")
        response = await self._dataplane.infer(body.request(request.model_name, context))
        is_long = is_long_answer(response)
        answer = await off_loop(render, response, body.id) if is_long else render(response, body.id)
        return answer, write_stamp(response.stamp) | {REQUEST_ID: context.id}

    async def index(self, request: Any, _call: Any) -> Any:
        index = await self._dataplane.catalog.index()
        return oip_grpc.render_index(m for m in index if not request.ready or m.state is ModelState.READY)

    async def load(self, request: Any, _call: Any) -> Any:
        oip.check_model(request.model_name)
        oip.refuse_load_parameters(request.parameters)
        await self._dataplane.load(request.model_name)
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: Any, _call: Any) -> Any:
        oip.check_model(request.model_name)
        await self._dataplane.catalog.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()


# The protocol's method, what takes it here, its request message.
_METHODS: tuple[tuple[str, str, Any], ...] = (
    ("ServerLive", "live", pb.ServerLiveRequest),
    ("ServerReady", "ready", pb.ServerReadyRequest),
    ("ServerMetadata", "server", pb.ServerMetadataRequest),
    ("ModelReady", "model_ready", pb.ModelReadyRequest),
    ("ModelMetadata", "model", pb.ModelMetadataRequest),
    ("ModelConfig", "model_config", pb.ModelConfigRequest),
    ("ModelStatistics", "statistics", pb.ModelStatisticsRequest),
    ("ModelInfer", "infer", pb.ModelInferRequest),
    ("RepositoryIndex", "index", pb.RepositoryIndexRequest),
    ("RepositoryModelLoad", "load", pb.RepositoryModelLoadRequest),
    ("RepositoryModelUnload", "unload", pb.RepositoryModelUnloadRequest),
)

# Methods of extensions that stock clients know and that we do not have.
_REFUSED: dict[str, str] = {
    "SystemSharedMemoryStatus": oip.NO_SHARED_MEMORY,
    "SystemSharedMemoryRegister": oip.NO_SHARED_MEMORY,
    "SystemSharedMemoryUnregister": oip.NO_SHARED_MEMORY,
    "CudaSharedMemoryStatus": oip.NO_SHARED_MEMORY,
    "CudaSharedMemoryRegister": oip.NO_SHARED_MEMORY,
    "CudaSharedMemoryUnregister": oip.NO_SHARED_MEMORY,
    "TraceSetting": oip.NO_TRACE_SETTINGS,
    "LogSettings": oip.NO_LOG_SETTINGS,
}


def _handlers(service: _Service) -> Any:
    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            _errors_as_codes(name, kind, getattr(service, own), service), response_serializer=_bytes
        )
        for name, own, kind in _METHODS
    }
    methods |= {name: grpc.unary_unary_rpc_method_handler(_refusing(text)) for name, text in _REFUSED.items()}
    methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
        service.stream_infer, response_serializer=_bytes
    )
    return grpc.method_handlers_generic_handler(oip_grpc.SERVICE, methods)


# What probes ask, and what needs no key. Of all else the key is looked at before the message is.
_OPEN = frozenset({"ServerLive", "ServerReady"})


def _errors_as_codes(name: str, kind: Any, method: Method, service: _Service) -> Method:
    async def handle(data: bytes, call: Any) -> Any:
        try:
            if name not in _OPEN:
                service.caller(call)
            return await method(oip_grpc.parse_message(kind, data), call)
        except Exception as exc:
            status = _status(name, exc)
        return await _abort(call, status)

    return handle


async def _abort(call: Any, status: Status) -> NoReturn:
    await call.abort(status.grpc, status.text, tuple(status.trailers.items()))
    raise AssertionError("abort raises")


def _refusing(text: str) -> Method:
    async def refuse(_data: bytes, call: Any) -> Any:
        return await call.abort(grpc.StatusCode.UNIMPLEMENTED, text)

    return refuse


def _status(name: str, exc: Exception) -> Status:
    """What the caller is told; what nobody foresaw is logged."""
    status = status_of(exc)
    if not status.is_ours:
        _log.error("%s failed", name, exc_info=exc)
    return status


def _bytes(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _metadata(call: Any) -> dict[str, str]:
    return joined((name, value) for name, value in call.invocation_metadata() or () if isinstance(value, str))


def _remaining_s(call: Any) -> float:
    remaining = call.time_remaining()
    return remaining if remaining is not None and remaining < _NO_DEADLINE_S else math.inf


def _cause(address: str) -> OSError:
    """gRPC keeps the cause to itself: asking the system once more tells it."""
    try:
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            socket.create_server((host.strip("[]"), int(port))).close()
    except OSError as exc:
        return exc
    return OSError("refused")


def _bind(server: Any, address: str, shown: str = "") -> int:
    try:
        port = int(server.add_insecure_port(address))
    except RuntimeError as exc:
        raise cannot_listen("grpc", shown or address, _cause(address)) from exc
    if port == 0:
        raise cannot_listen("grpc", shown or address, OSError("refused"))
    return port
