"""The client of an asyncio program: our gRPC client for each endpoint, and the one retry that is a client's to make.

A call moves to another endpoint only when its connection broke without an answer. An answer, also one that says "not
now", is the caller's: all other retries are the router's, behind the endpoint. Leaves the wire to `OipClient`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy.typing as npt

from common.errors import DeadlineExceeded, OutriderError, TargetUnreachable
from common.request import Parameter, Priority, Privacy, Reason
from common.serving.catalog import ModelMetadata, ModelStatus
from common.tensors import Tensors
from common.transport.grpc_client import OipClient
from common.transport.tenants import checked_key
from edge.client.endpoints import Rotation, parse_endpoints
from edge.in_process import checked_model, checked_request, checked_seconds

CALL_S = 5.0  # bound of the calls that ask about models and servers, and what one try of them takes at most
LOAD_S = 300.0  # the same for loads: building an engine takes its time
CLOSED = "this client is closed"
API_KEY_VARIABLE = "OUTRIDER_API_KEY"

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`outputs` are (read-only) arrays by name, the batch first; the rest is the stamp: `target` is the kind of place
    that answered (edge, cache, cloud), `by` the process there, `reason` why the call left the edge, if it did."""

    outputs: Tensors
    target: str
    reason: Reason | None
    model: str
    version: str
    by: str


class AsyncClient:
    """An async context, for one event loop. `endpoints`: gRPC listeners of nodes or gateways, ``host:port`` or
    ``unix:/path``, the nearest first; raises `ConfigError` for anything else.

    `connect_s` bounds the wait for a connection to each of them. `api_key` goes with every call; None: that of the
    environment variable OUTRIDER_API_KEY, if it is set. Every method raises the errors of `common.errors`:
    `TargetUnreachable` when no endpoint can be reached, otherwise what the endpoint said; RuntimeError once closed.
    """

    def __init__(self, endpoints: str | Sequence[str], *, connect_s: float = 1.0, api_key: str | None = None) -> None:
        self.endpoints, self.connect_s = parse_endpoints(endpoints), connect_s
        self._api_key = _api_key(api_key)
        self._rotation = Rotation(self.endpoints)
        self._clients: dict[str, OipClient] = {}
        self._looks: set[asyncio.Task[None]] = set()  # at nearer endpoints that had failed
        self._stack = AsyncExitStack()
        self._closed_because = "this client is not open: use it as `async with AsyncClient(...) as client`"

    async def __aenter__(self) -> Self:
        if self._closed_because == CLOSED:
            raise RuntimeError(CLOSED)
        for address in self.endpoints:
            client = OipClient(address, connect_s=self.connect_s, api_key=self._api_key)
            self._clients[address] = await self._stack.enter_async_context(client)
        self._closed_because = ""
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the calls in progress, too: each raises RuntimeError."""
        self._closed_because = CLOSED
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)
        await self._stack.aclose()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        outputs: tuple[str, ...] = (),
        classes: int = 0,
        timeout_s: float = math.inf,
        priority: Priority = Priority.INTERACTIVE,
        privacy: Privacy = Privacy.ANY,
        pin: str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> Answer:
        """One call, with the arguments of `Node.infer`. Inputs are arrays by name, the batch first.

        `timeout_s` is the time left to answer, all tries together. A DEVICE_ONLY call goes to the first endpoint and to
        no other: that one is the caller's device.
        """
        request = checked_request(
            model,
            inputs,
            outputs=outputs,
            classes=classes,
            timeout_s=timeout_s,
            priority=priority,
            privacy=privacy,
            pin=pin,
            parameters=parameters,
        )
        if request.context.privacy is Privacy.DEVICE_ONLY:
            response = await self._try(self.endpoints[0], lambda client: client.infer(request))
        else:
            response = await self._anywhere(lambda client: client.infer(request))
        stamp = response.stamp
        return Answer(
            outputs=response.outputs,
            target=stamp.target,
            reason=stamp.reason,
            model=stamp.model,
            version=stamp.version,
            by=stamp.by,
        )

    async def ready(self, *, timeout_s: float = CALL_S) -> bool:
        """Whether the endpoint in use takes calls; False when none can be reached, or none says so in time."""
        try:
            return await self._within(timeout_s, "", lambda: self._anywhere(lambda client: client.server_ready()))
        except (TargetUnreachable, DeadlineExceeded):
            return False

    async def metadata(self, model: str, version: str | None = None, *, timeout_s: float = CALL_S) -> ModelMetadata:
        name, pin = checked_model(model, version, "version")
        return await self._within(
            timeout_s, name, lambda: self._anywhere(lambda client: client.model_metadata(name, pin))
        )

    async def index(self, *, timeout_s: float = CALL_S) -> list[ModelStatus]:
        """The models of the endpoint in use."""
        return await self._within(timeout_s, "", lambda: self._anywhere(lambda client: client.index()))

    async def load(self, model: str, *, timeout_s: float = LOAD_S) -> None:
        """Loads `model` at the endpoint in use. Not moved to another: it would change another process."""
        await self._within(timeout_s, model, lambda: self._here(model, lambda client: client.load(model)))

    async def unload(self, model: str, *, timeout_s: float = CALL_S) -> None:
        """Unloads `model` at the endpoint in use, like `load`."""
        await self._within(timeout_s, model, lambda: self._here(model, lambda client: client.unload(model)))

    async def _anywhere(self, call: Callable[[OipClient], Awaitable[T]]) -> T:
        """The first answer; each endpoint is tried once at most."""
        if not self._closed_because and (address := self._rotation.due(time.monotonic())) is not None:
            self._looks.add(look := asyncio.create_task(self._look(address), name=f"look-at-{address}"))
            look.add_done_callback(self._looks.discard)
        tried: list[str] = []
        broken: TargetUnreachable | None = None
        while (address := self._rotation.choose(tried, time.monotonic())) is not None:
            tried.append(address)
            try:
                return await self._try(address, call)
            except TargetUnreachable as exc:
                _log.info("%s", exc)
                broken = exc
        assert broken is not None
        if len(tried) == 1:
            raise broken
        raise TargetUnreachable(", ".join(tried), f"none of {len(tried)} endpoints; the last one: {broken.problem}")

    async def _here(self, model: str, call: Callable[[OipClient], Awaitable[T]]) -> T:
        checked_model(model, None, "")
        return await self._try(self._rotation.current, call)

    async def _try(self, address: str, call: Callable[[OipClient], Awaitable[T]]) -> T:
        if self._closed_because:
            raise RuntimeError(self._closed_because)
        try:
            result = await call(self._clients[address])
        except TargetUnreachable:
            self._rotation.failed(address, time.monotonic())
            raise
        except DeadlineExceeded:  # perhaps the endpoint's word, perhaps only our clock's: says nothing about it
            raise
        except OutriderError:
            self._rotation.answered(address)
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed_because and not (task and task.cancelling()):  # by the channel, not by our caller
                raise RuntimeError(self._closed_because) from None
            raise
        self._rotation.answered(address)
        return result

    async def _look(self, address: str) -> None:
        """A nearer endpoint that had failed is used again once it says that it is ready: no call pays for the try."""
        try:
            is_ready = await self._clients[address].server_ready(timeout_s=self.connect_s)
        except OutriderError:
            is_ready = False
        if is_ready:
            self._rotation.answered(address)
        else:
            self._rotation.failed(address, time.monotonic())

    async def _within(self, timeout_s: float, model: str, call: Callable[[], Awaitable[T]]) -> T:
        """`OipClient` bounds each try; this bounds all of them together."""
        seconds = checked_seconds(timeout_s)
        try:
            async with asyncio.timeout(seconds if seconds < math.inf else None):
                return await call()
        except TimeoutError:
            raise DeadlineExceeded(model, f"waiting for {self._rotation.current}") from None


def _api_key(given: str | None) -> str:
    key = os.environ.get(API_KEY_VARIABLE, "") if given is None else given
    return checked_key(key, "client", "api_key" if given is not None else API_KEY_VARIABLE) if key else ""
