"""A link to a place far away: every byte takes half a round trip either way, a new connection one round trip more.

In order and pipelined, as a network is: what is sent together arrives together. Bandwidth and loss are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import cast


class _End(asyncio.Protocol):
    """One end of a connection through the link; what it reads comes out of the other end half a round trip later."""

    def __init__(self, one_way_s: float) -> None:
        self._one_way_s = one_way_s
        self._loop = asyncio.get_running_loop()
        self._early: list[bytes] = []
        self.other: _End | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        for data in self._early:
            self.transport.write(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        self._loop.call_later(self._one_way_s, self.other.send, data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self._loop.call_later(self._one_way_s, self.other.close)

    def send(self, data: bytes) -> None:
        if self.transport is None:
            self._early.append(data)
        elif not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Both ends at once, whatever is on its way."""
        for end in (self, self.other):
            if end is not None and end.transport is not None:
                end.transport.abort()


class _Entrance(_End):
    """The caller's end. Its first byte waits for the handshake, one round trip, before it sets out."""

    def __init__(self, one_way_s: float, host: str, port: int) -> None:
        super().__init__(one_way_s)
        self._host, self._port = host, port
        self._handshake_until = self._loop.time() + 2 * one_way_s
        self.other = _End(one_way_s)
        self.other.other = self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.ensure_future(self._connect())

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        leaves = max(self._loop.time(), self._handshake_until)
        self._loop.call_at(leaves + self._one_way_s, self.other.send, data)

    async def _connect(self) -> None:
        try:
            await self._loop.create_connection(lambda: cast(_End, self.other), self._host, self._port)
        except OSError:
            self.close()


@contextlib.asynccontextmanager
async def far(address: str, round_trip_s: float) -> AsyncIterator[str]:
    """Yields the near address (host:port) of the link to `address` (host:port)."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    entrances: list[_Entrance] = []

    def enter() -> _Entrance:
        entrances.append(_Entrance(round_trip_s / 2, host, int(port)))
        return entrances[-1]

    server = await loop.create_server(enter, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for entrance in entrances:
            entrance.abort()
        await asyncio.sleep(0)  # the transports close
        await server.wait_closed()
