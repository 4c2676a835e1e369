"""An infer call over HTTP, and the short way for one that is written as clients write it.

Half of a small call's CPU was the web framework's (docs/decisions.md). A connection takes the short way for as long as
its requests are plain: POST to an infer route, HTTP/1.1, a Content-Length, every header once, nothing about codings or
the connection. The first one that is not goes to aiohttp's protocol as it came, with all that follows it there: what is
odd about HTTP is the library's to judge.
"""

from __future__ import annotations

import asyncio
import email.utils
import functools
import logging
import re
import select
import socket
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import cast

import msgspec

from common.request import Stamp
from common.serving.dataplane import DataPlane
from common.transport import oip, oip_json
from common.transport.headers import REQUEST_ID, Said, read_context, write_stamp
from common.transport.off_loop import off_loop
from common.transport.sizes import is_long_answer, is_long_body
from common.transport.status import status_of
from common.transport.tenants import Caller, Tenants

_log = logging.getLogger(__name__)

_MAX_HEAD, _MAX_BODY = 2 << 10, 256 << 10  # bytes; a larger call has other costs than the framework's
_MAX_AHEAD = 2 << 20  # of the next requests while one is answered; the rest waits where it is
_LOOK_S = 0.05  # between two looks whether a caller who is not read from has left
_IDLE_S = 75.0  # after which a connection that says nothing is closed, as aiohttp's are
_START = re.compile(
    rb"POST /v2/models/([A-Za-z0-9_][A-Za-z0-9_.-]*)(?:/versions/([A-Za-z0-9_][A-Za-z0-9_.-]*))?/infer HTTP/1\.1"
)
_FIELD = re.compile(rb"([A-Za-z0-9_-]+):[ \t]*([\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?)?[ \t]*")
_NOT_PLAIN = frozenset(
    {"transfer-encoding", "content-encoding", "accept-encoding", "connection", "expect", "upgrade", "te"}
)
_LENGTH = re.compile(r"[0-9]{1,9}")


class Head(msgspec.Struct, frozen=True):
    """A plain request's line and headers: names in lower case. To be read, never changed: equal heads share one."""

    model: str
    version: str
    length: int
    headers: Mapping[str, str]


async def infer(
    dataplane: DataPlane, model: str, version: str, headers: Mapping[str, str], data: bytes, caller: Caller
) -> tuple[bytes, Stamp, dict[str, str]]:
    """One infer call: the answer's body, its stamp, and the headers beside the stamp's. The names in `headers` are in
    lower case. Raises the errors of `common.errors`."""
    size, parse, render = headers.get(oip_json.HEADER_LENGTH.lower()), oip_json.parse_infer, oip_json.render_infer
    body = await off_loop(parse, data, size) if is_long_body(data, size) else parse(data, size)
    said = Said(id=body.id, version=version, parameters=body.parameters)
    context = read_context(headers, said, time.monotonic(), caller=caller)
    oip.check_model(model, context.pin or "")
    response = await dataplane.infer(body.request(model, context))
    is_long = is_long_answer(response)
    content, form = await off_loop(render, response, body) if is_long else render(response, body)
    return content, response.stamp, form | {REQUEST_ID: context.id}


class InferProtocol(asyncio.Protocol):
    """One connection. `rest` is the library's protocol for it, `connections` has the open ones that are still ours."""

    def __init__(
        self, dataplane: DataPlane, tenants: Tenants, rest: asyncio.Protocol, connections: set[InferProtocol]
    ) -> None:
        self._dataplane, self._tenants = dataplane, tenants
        self._rest, self._connections = rest, connections
        self._loop = asyncio.get_running_loop()
        self._data = b""
        self._call: asyncio.Task[None] | None = None
        self._is_writable = True
        self._watch: asyncio.TimerHandle | None = None  # set while reading is paused

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so
        peer = transport.get_extra_info("socket")
        self._is_local = peer is not None and peer.family == socket.AF_UNIX
        self._rest.connection_made(transport)
        self._connections.add(self)
        self._heard_at = self._loop.time()
        self._timer = self._loop.call_later(_IDLE_S, self._close_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        if self._call is not None:
            self._call.cancel()
        self._rest.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self not in self._connections:
            self._rest.data_received(data)
            return
        self._heard_at = self._loop.time()
        self._data = self._data + data if self._data else data
        if self._call is None and self._is_writable:
            self._next()
        elif len(self._data) > _MAX_AHEAD and self._watch is None:
            self._transport.pause_reading()
            self._look()

    def eof_received(self) -> bool | None:
        return self._rest.eof_received()

    def pause_writing(self) -> None:
        self._is_writable = False
        self._rest.pause_writing()

    def resume_writing(self) -> None:
        self._is_writable = True
        self._rest.resume_writing()
        if self._call is None and self in self._connections:
            self._go_on()

    # --- the short way ---

    async def drain(self) -> None:
        """Waits for the call in progress; then the connection is closed."""
        if self._call is not None:
            await asyncio.wait([self._call])
        self._transport.close()

    def _next(self) -> None:
        """Starts the next call, where one has arrived whole."""
        data = self._data
        end = data.find(b"\r\n\r\n", 0, _MAX_HEAD)
        if end < 0 and len(data) < _MAX_HEAD:
            return  # an incomplete head waits here, where it is given up in time
        head = _head(data[:end]) if end > 0 else None
        if head is None:
            self._hand_over()
            return
        end += 4
        if len(data) < end + head.length:
            return
        self._data = data[end + head.length :]
        self._call = self._loop.create_task(self._answer(head, data[end : end + head.length]), name="http-infer")

    async def _answer(self, head: Head, body: bytes) -> None:
        try:
            caller = self._tenants.caller(head.headers, is_local=self._is_local)
            content, stamp, headers = await infer(self._dataplane, head.model, head.version, head.headers, body, caller)
            parts = [b"HTTP/1.1 200 OK\r\n", _stamp(stamp), _fields(headers, len(content)), content]
        except Exception as exc:
            parts = _refusal(exc, head.model)
        self._transport.write(b"".join(parts))
        self._call = None
        self._go_on()

    def _go_on(self) -> None:
        if not self._is_writable:
            return
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
            self._transport.resume_reading()
        self._next()

    def _look(self) -> None:
        """A connection that is not read from does not say that it has ended: the kernel knows."""
        if _has_left(self._transport):
            self._transport.abort()
        else:
            self._watch = self._loop.call_later(_LOOK_S, self._look)

    def _hand_over(self) -> None:
        self._leave()
        data, self._data = self._data, b""
        self._rest.data_received(data)

    def _leave(self) -> None:
        self._connections.discard(self)
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()

    def _close_idle(self) -> None:
        left_s = self._heard_at + _IDLE_S - self._loop.time()
        if left_s <= 0 and self._call is None:
            self._transport.close()
        else:
            self._timer = self._loop.call_later(max(left_s, 1.0), self._close_idle)


def _has_left(transport: asyncio.Transport) -> bool:
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


@functools.lru_cache(maxsize=512)  # a client's requests differ in their bodies
def _head(data: bytes) -> Head | None:
    """None where the request is not plain."""
    start, *lines = data.split(b"\r\n")
    line = _START.fullmatch(start)
    headers: dict[str, str] = {}
    for text in lines:
        field = _FIELD.fullmatch(text)
        if line is None or field is None:
            return None
        name = field[1].decode().lower()
        if name in headers:
            return None
        headers[name] = (field[2] or b"").decode()
    length = headers.get("content-length", "")
    if line is None or "host" not in headers or not _LENGTH.fullmatch(length) or int(length) > _MAX_BODY:
        return None
    if not _NOT_PLAIN.isdisjoint(headers) and not _is_of_no_consequence(headers):
        return None
    return Head(line[1].decode(), (line[2] or b"").decode(), int(length), headers)


def _is_of_no_consequence(headers: Mapping[str, str]) -> bool:
    """What HTTP libraries send by themselves: a list of codings, of which none is a wish, and that they stay."""
    others = _NOT_PLAIN & headers.keys() - {"accept-encoding", "connection"}
    codings = headers.get("accept-encoding", "identity")
    keeps = headers.get("connection", "keep-alive").lower() == "keep-alive"
    return not others and keeps and ("," in codings or codings in ("identity", "*"))


@functools.lru_cache(maxsize=1024)
def _stamp(stamp: Stamp) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in write_stamp(stamp).items()).encode()


def _fields(headers: Mapping[str, str], length: int) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"{lines}Content-Length: {length}\r\nDate: {_date(int(time.time()))}\r\n\r\n".encode()


@functools.lru_cache(maxsize=1)
def _date(second: int) -> str:
    return email.utils.formatdate(second, usegmt=True)


def _refusal(exc: Exception, model: str) -> list[bytes]:
    status = status_of(exc)
    if not status.is_ours:
        _log.exception("infer of model %r failed", model)
    content = oip_json.dump({"error": status.text})
    line = f"HTTP/1.1 {status.http} {HTTPStatus(status.http).phrase}\r\n".encode()
    return [line, _fields(status.headers | {"Content-Type": "application/json"}, len(content)), content]
