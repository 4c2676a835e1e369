"""An MQTT client that says what it is told to: packets of MQTT 3.1.1, by hand after the standard."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

ACCEPTED = bytes((0x20, 2, 0, 0))


def text(value: str) -> bytes:
    return len(value.encode()).to_bytes(2) + value.encode()


def packet(kind: int, body: bytes) -> bytes:
    assert len(body) < 128
    return bytes((kind, len(body))) + body


def connect(client: str, *, will: str | None = None, clean: bool = True) -> bytes:
    flags = (0x02 if clean else 0) | (0x24 if will is not None else 0)  # a will is retained
    body = text("MQTT") + bytes((4, flags, 0, 60)) + text(client)
    return packet(0x10, body + (b"" if will is None else text(will) + text("dead")))


def subscribe(topic: str) -> bytes:
    return packet(0x82, bytes((0, 1)) + text(topic) + bytes((0,)))


def publish(topic: str, data: bytes) -> bytes:
    return packet(0x31, text(topic) + data)  # QoS 0, retained


class Wire:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hear(self) -> bytes:
        """The next packet; nothing where the connection has ended. Raises TimeoutError after 10 s of silence."""
        async with asyncio.timeout(10):
            try:
                head = await self._reader.readexactly(2)
                return head + await self._reader.readexactly(head[1])
            except (asyncio.IncompleteReadError, OSError):
                return b""

    async def answered(self) -> bytes:
        """What comes before the answer to a ping: everything that was on its way to this client."""
        await self.say(bytes((0xC0, 0)))
        came = b""
        while (one := await self.hear()) not in (b"", bytes((0xD0, 0))):
            came += one
        return came


@contextlib.asynccontextmanager
async def dialled(address: str, tls: ssl.SSLContext | None) -> AsyncIterator[Wire]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
