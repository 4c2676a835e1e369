"""The embedded MQTT broker (amqtt): hints for one machine or a few hundred nodes, with nothing to install.

Owns amqtt. Listens by itself and hands connections over, so that port 0 works and the port is known. asyncio sets
TCP_NODELAY on accepted connections. Retained messages live in memory: announcers say them again after a restart.
With a CA: TLS, and only clients with its certificates, each to its own topics (sync/pki/members.py has the rules).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from amqtt.adapters import ReaderAdapter, StreamReaderAdapter, StreamWriterAdapter
from amqtt.broker import Broker
from amqtt.contexts import Action
from amqtt.plugins.base import BaseAuthPlugin, BaseTopicPlugin
from amqtt.session import Session

from common.errors import ConfigError, OutriderError
from sync.pki.authority import BROKER, Authority, names_of
from sync.pki.door import check_exposure
from sync.pki.members import Members

logger = logging.getLogger(__name__)
_ADDRESS: Final = "a free address of this machine; port 0: any free one"
_LISTENER: Final = "default"
_LISTENERS: Final = {_LISTENER: {"type": "external", "bind": "unused"}}
_OPEN: Final = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
_CERTIFIED: Final = f"{__name__}.CertificatePlugin"
_HANDSHAKE_S: Final = 10.0
_RENEW_S: Final = 60.0
_Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def broker(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    ca: Path | None = None,
    dns: Sequence[str] = (),
    is_insecure: bool = False,
) -> AsyncIterator[str]:
    """A running broker; yields its address, host:port. `ca`: a CA's folder; `dns`: more names for the certificate."""
    try:
        check_exposure(host, is_certified=ca is not None, is_insecure=is_insecure)
    except ValueError as exc:
        raise ConfigError("broker", "--host", str(exc)) from exc
    async with _open(host, port) if ca is None else _certified(host, port, Authority(ca), dns) as address:
        yield address


@contextlib.asynccontextmanager
async def _open(host: str, port: int) -> AsyncIterator[str]:
    async with (
        _running(_OPEN) as running,
        _listening(partial(_hand_over, running), host, port, None) as address,
    ):
        yield address


@contextlib.asynccontextmanager
async def _certified(host: str, port: int, authority: Authority, dns: Sequence[str]) -> AsyncIterator[str]:
    server = _ServerSide(authority, names_of(host, dns))
    members = Members(authority.deny_list())
    async with (
        _running({_CERTIFIED: {"members": members}}) as running,
        _listening(partial(_let_in, running, members), host, port, server.context) as address,
    ):
        loops = [asyncio.create_task(one, name="mqtt-certificates") for one in (members.sweep(), server.keep_fresh())]
        try:
            yield address
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)


class CertificatePlugin(BaseAuthPlugin, BaseTopicPlugin):  # type: ignore[misc]  # amqtt has no types
    """Asks `Members` about every client, subscription and message."""

    @dataclass
    class Config:
        members: Members

    async def authenticate(self, *, session: Session) -> bool:
        members: Members = self.config.members
        return members.is_in(session.client_id)

    async def topic_filtering(
        self, *, session: Session | None = None, topic: str | None = None, action: Action | None = None
    ) -> bool:
        if session is None or topic is None:
            return False
        members: Members = self.config.members
        if action is Action.PUBLISH:
            return members.may_publish(session.client_id, topic)
        return members.may_hear(session.client_id, topic)


class _Broker(Broker):  # type: ignore[misc]
    async def _publish_retained_messages_for_subscription(
        self, subscription: tuple[str, int], session: Session
    ) -> None:
        """amqtt goes through everybody's subscriptions for each client that connects, and asks nobody."""
        if await self._topic_filtering(session, subscription[0], Action.RECEIVE):
            await super()._publish_retained_messages_for_subscription(subscription, session)


class _ServerSide:
    """The broker's own certificate, which the CA replaces in time."""

    def __init__(self, authority: Authority, names: tuple[str, ...]) -> None:
        self._authority, self._names = authority, names
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.root_file))
        self.context.verify_mode = ssl.CERT_REQUIRED
        self._load()

    async def keep_fresh(self) -> None:
        """Until cancelled. Connections that come later get the new one."""
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                await asyncio.to_thread(self._load)
            except (OutriderError, OSError) as exc:
                logger.error("the broker's own certificate cannot be renewed: %s", exc)

    def _load(self) -> None:
        self.context.load_cert_chain(self._authority.server(BROKER, self._names) / "identity.pem")


class _Replay(ReaderAdapter):  # type: ignore[misc]
    """A connection whose first bytes were read already."""

    def __init__(self, read: bytes, reader: asyncio.StreamReader) -> None:
        self._read, self._reader = read, StreamReaderAdapter(reader)

    async def read(self, n: int = -1) -> bytes:
        if not self._read:
            return bytes(await self._reader.read(n))
        data, self._read = (self._read, b"") if n == -1 else (self._read[:n], self._read[n:])
        if 0 < n != len(data):
            data += await self._reader.read(n - len(data))
        return data

    def feed_eof(self) -> None:
        self._reader.feed_eof()


@contextlib.asynccontextmanager
async def _running(plugins: dict[str, Any]) -> AsyncIterator[Broker]:
    running = _Broker({"listeners": _LISTENERS, "plugins": plugins})
    await running.start()
    try:
        yield running
    finally:
        await running.shutdown()


@contextlib.asynccontextmanager
async def _listening(handler: _Handler, host: str, port: int, context: ssl.SSLContext | None) -> AsyncIterator[str]:
    timeout_s = None if context is None else _HANDSHAKE_S
    try:
        server = await asyncio.start_server(handler, host, port, ssl=context, ssl_handshake_timeout=timeout_s)
    except (OSError, OverflowError) as exc:
        problem = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ConfigError("broker", f"{host}:{port}", f"cannot listen: {problem}", _ADDRESS) from exc
    try:
        bound_host, bound_port = server.sockets[0].getsockname()[:2]
        yield f"{bound_host}:{bound_port}"
    finally:
        server.close()


async def _hand_over(running: Broker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await running.external_connected(StreamReaderAdapter(reader), StreamWriterAdapter(writer), _LISTENER)
    finally:
        writer.close()


async def _let_in(
    running: Broker, members: Members, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    connect = None
    try:
        connect = await members.enter(reader, writer)
        if connect is not None:
            await running.external_connected(_Replay(connect.raw, reader), StreamWriterAdapter(writer), _LISTENER)
    finally:
        if connect is not None:
            members.leave(connect, writer)
        writer.close()
