"""MQTT hints: the service says that metadata has changed, nodes poll a little earlier. The poll stays the truth.

One small retained message per group on ``outrider/hint/<group>`` (format 1, JSON): the signed timestamp metadata as
text and the window, in milliseconds, over which nodes should spread. Owns the MQTT client.
A lost broker costs speed only.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiomqtt
import msgspec

from common.errors import ConfigError, EavesdropRefused, IdentityRefused
from sync.pki.channel import is_stranger

if TYPE_CHECKING:
    from sync.pki.identity import Identity

logger = logging.getLogger(__name__)

FORMAT: Final = 1
MAX_HINT_BYTES: Final = 64 << 10
_FIRST_RETRY_S: Final = 0.2
_LAST_RETRY_S: Final = 30.0
_TIMEOUT_S: Final = 5.0
_REFUSED: Final = 0x80  # MQTT's answer to a subscription that is not allowed
_NODELAY: Final = ((socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """What a hint claims; nothing of it is verified."""

    timestamp_version: int
    spread_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    timestamp: str
    spread_ms: int
    format: int = FORMAT


def topic(group: str) -> str:
    return f"outrider/hint/{group}"


def make_hint(timestamp: bytes, spread_ms: int) -> bytes:
    return msgspec.json.encode(_Message(timestamp=timestamp.decode(), spread_ms=spread_ms))


def parse_hint(payload: bytes) -> Hint | None:
    """None for anything that is not a hint."""
    if len(payload) > MAX_HINT_BYTES:
        return None
    try:
        message = msgspec.json.decode(payload, type=_Message)
        version: Any = msgspec.json.decode(message.timestamp, type=dict[str, Any])["signed"]["version"]
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, RecursionError):
        return None
    if message.format != FORMAT or type(version) is not int or message.spread_ms < 0:
        return None
    return Hint(timestamp_version=version, spread_ms=message.spread_ms)


class Announcer:
    """Keeps the broker's retained hint equal to the last `announce`, through any number of reconnects."""

    def __init__(
        self, broker: str, *, group: str = "default", spread_ms: int = 0, identity: Identity | None = None
    ) -> None:
        """With an `identity` over TLS, showing its certificate."""
        self._broker, self._topic, self._spread_ms, self._identity = broker, topic(group), spread_ms, identity
        self._hint: bytes | None = None
        self._changed = asyncio.Event()

    def announce(self, timestamp: bytes) -> None:
        self._hint = make_hint(timestamp, self._spread_ms)
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        await _reconnecting(self._broker, self._publish, self._identity)

    async def _publish(self, client: aiomqtt.Client) -> None:
        self._changed.set()  # a broker that was away has forgotten
        while True:
            await _changed_or_gone(self._changed, client)
            self._changed.clear()
            if self._hint is not None:
                await client.publish(self._topic, self._hint, qos=1, retain=True, timeout=_TIMEOUT_S)


class Listener:
    """Hands every hint of a group to `on_hint`, which has to be quick."""

    def __init__(
        self,
        broker: str,
        on_hint: Callable[[Hint], None],
        *,
        group: str = "default",
        identity: Identity | None = None,
    ) -> None:
        """With an `identity` over TLS, showing its certificate."""
        self._broker, self._topic, self._on_hint, self._identity = broker, topic(group), on_hint, identity

    async def run(self) -> None:
        """Until cancelled."""
        await _reconnecting(self._broker, self._listen, self._identity)

    async def _listen(self, client: aiomqtt.Client) -> None:
        granted = await client.subscribe(self._topic, qos=1, timeout=_TIMEOUT_S)
        if granted and getattr(granted[0], "value", granted[0]) >= _REFUSED:
            logger.warning("broker %s keeps the hints on %r from this node; polling goes on", self._broker, self._topic)
        async for message in client.messages:
            hint = parse_hint(message.payload) if isinstance(message.payload, bytes) else None
            if hint is not None and message.topic.value == self._topic:
                self._on_hint(hint)


async def _changed_or_gone(changed: asyncio.Event, client: aiomqtt.Client) -> None:
    """Waits for news; notices a lost connection by reading, as nothing is ever sent to an announcer."""
    waiting = {
        asyncio.ensure_future(changed.wait()),
        asyncio.ensure_future(anext(client.messages)),
    }
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _reconnecting(broker: str, talk: Callable[[aiomqtt.Client], Any], identity: Identity | None = None) -> None:
    retry_s = _FIRST_RETRY_S
    while True:
        try:
            async with await _client(broker, identity) as client:
                retry_s = _FIRST_RETRY_S
                await talk(client)
        except (aiomqtt.MqttError, OSError, ConfigError, IdentityRefused) as exc:
            if is_stranger(str(exc)):
                refused = EavesdropRefused("hints", broker, str(exc))
                logger.warning("%s; polling goes on", refused)
            else:
                logger.info("broker %s is away (%s); polling goes on", broker, exc)
        await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
        retry_s = min(_LAST_RETRY_S, retry_s * 2)


async def _client(broker: str, identity: Identity | None) -> aiomqtt.Client:
    """Its identifier begins with its certificate's name, which the broker asks for; a second one does not end it."""
    host, _, port = broker.rpartition(":")
    name = None if identity is None else f"{identity.current().facts.name}/{secrets.token_hex(4)}"
    return aiomqtt.Client(
        host.strip("[]"),
        int(port),
        identifier=name,
        tls_context=None if identity is None else await asyncio.to_thread(identity.tls),
        timeout=_TIMEOUT_S,
        socket_options=_NODELAY,
        max_queued_incoming_messages=64,
    )
