"""Our client of the Open Inference Protocol over gRPC: how a node calls the gateway, and the gateway its workers.

Owns the connection: a dead peer is an error at once, a silent one within `connect_s`, a returned one is found within
two seconds. Every failure is one of our errors. It never retries: who routes decides that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import grpc

from common.errors import DeadlineExceeded, TargetUnreachable, Unauthenticated
from common.request import Request, Response
from common.serving.catalog import ModelMetadata, ModelStatus
from common.transport import oip_grpc
from common.transport.headers import read_stamp, write_context
from common.transport.listen import MAX_BODY_BYTES
from common.transport.proto import oip_pb2 as pb
from common.transport.status import error_from_grpc
from common.transport.tenants import AUTHORIZATION

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    ("grpc.max_send_message_length", MAX_BODY_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1500),
    # a peer that is silent on an open connection is found out, even while calls without a deadline wait for it
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 3000),
)
_CALL_S = 5.0  # bound of the calls that carry no deadline of their own (health, metadata, index)
_NO_DEADLINE_S = 1e9  # what is farther away does not fit into gRPC's clock, which takes it for the past
_LOAD_S = 300.0  # building an engine takes its time


class OipClient:
    """One peer at ``host:port`` or ``unix:/path``. An async context; made and used on one event loop.

    `api_key` goes with every call. `is_hop`: this process passes on what others asked, so that a key which the peer
    does not know is this process's fault (`TargetUnreachable`), not its caller's.
    """

    def __init__(self, address: str, *, connect_s: float = 1.0, api_key: str = "", is_hop: bool = False) -> None:
        self.address, self.connect_s, self._is_hop = address, connect_s, is_hop
        self._credentials = ((AUTHORIZATION, f"Bearer {api_key}"),) if api_key else ()
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._infer = self._method("ModelInfer", pb.ModelInferResponse)

    async def __aenter__(self) -> OipClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def infer(self, request: Request) -> Response:
        """The peer's stamped answer. Raises what the peer said, `DeadlineExceeded` at the request's own deadline, and
        `TargetUnreachable` when there is no connection or it broke without an answer."""
        now = time.monotonic()
        context = request.context
        if context.deadline <= now:
            raise DeadlineExceeded(request.model, f"before it was sent to {self.address}")
        await self._connect(request.model, context.deadline)
        remaining = context.deadline - time.monotonic()
        call = self._infer(
            oip_grpc.write_request(request),
            timeout=max(0.0, remaining) if remaining < _NO_DEADLINE_S else None,
            metadata=(*write_context(context, time.monotonic()).items(), *self._credentials),
        )
        try:
            message = await call
            trailing = _texts(await call.trailing_metadata())
        except grpc.aio.AioRpcError as exc:
            raise self._error(exc, request.model) from exc
        stamp = read_stamp(trailing, message.model_name, message.model_version)
        return oip_grpc.read_response(message, stamp)

    async def server_ready(self, *, timeout_s: float = _CALL_S) -> bool:
        reply = await self._call("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse, timeout_s=timeout_s)
        return bool(reply.ready)

    async def model_ready(self, model: str, version: str | None = None) -> bool:
        request = pb.ModelReadyRequest(name=model, version=version or "")
        return bool((await self._call("ModelReady", request, pb.ModelReadyResponse, model=model)).ready)

    async def model_metadata(self, model: str, version: str | None = None) -> ModelMetadata:
        request = pb.ModelMetadataRequest(name=model, version=version or "")
        reply = await self._call("ModelMetadata", request, pb.ModelMetadataResponse, model=model)
        return oip_grpc.read_metadata(reply)

    async def index(self, *, timeout_s: float = _CALL_S) -> list[ModelStatus]:
        reply = await self._call(
            "RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse, timeout_s=timeout_s
        )
        return oip_grpc.read_index(reply)

    async def load(self, model: str) -> None:
        request = pb.RepositoryModelLoadRequest(model_name=model)
        await self._call("RepositoryModelLoad", request, pb.RepositoryModelLoadResponse, model=model, timeout_s=_LOAD_S)

    async def unload(self, model: str) -> None:
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        await self._call("RepositoryModelUnload", request, pb.RepositoryModelUnloadResponse, model=model)

    async def _call(self, name: str, request: Any, reply: Any, *, model: str = "", timeout_s: float = _CALL_S) -> Any:
        await self._connect(model, time.monotonic() + timeout_s)
        try:
            return await self._method(name, reply)(request, timeout=timeout_s, metadata=self._credentials)
        except grpc.aio.AioRpcError as exc:
            raise self._error(exc, model) from exc

    def _method(self, name: str, reply: Any) -> Any:
        return self._channel.unary_unary(
            f"/{oip_grpc.SERVICE}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )

    async def _connect(self, model: str, deadline: float) -> None:
        """Returns once the channel is up: at once in the usual case. A peer that failed lately fails at once, too."""
        if (state := self._channel.get_state(try_to_connect=True)) is grpc.ChannelConnectivity.READY:
            return
        now = time.monotonic()
        try:
            async with asyncio.timeout(min(self.connect_s, deadline - now)):
                while state is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise TargetUnreachable(self.address, "cannot connect")
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state(try_to_connect=True)
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(model, f"connecting to {self.address}") from None
            raise TargetUnreachable(self.address, f"no connection within {self.connect_s} s") from None

    def _error(self, exc: grpc.aio.AioRpcError, model: str) -> Exception:
        trailing = _texts(exc.trailing_metadata() or ())
        error = error_from_grpc(exc.code(), exc.details() or "", trailing, target=self.address, model=model)
        if self._is_hop and isinstance(error, Unauthenticated):
            return TargetUnreachable(self.address, f"it refuses the key of this process (api_key_file): {error}")
        return error


def _texts(metadata: Any) -> Mapping[str, str]:
    return {name: value for name, value in metadata or () if isinstance(value, str)}
