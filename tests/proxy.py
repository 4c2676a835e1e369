"""A small TCP proxy between two processes of a test, which misbehaves on demand: slow, silent, broken."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator


class Proxy:
    """Forwards to `target` (host:port). Its modes may be changed at any time; connections that are open follow.

    `blackhole`: accepts and reads, answers nothing. `delay_s`: holds each piece back for so long, either way.
    `bytes_per_s`: a throttled link.
    """

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.blackhole = False
        self.delay_s = 0.0
        self.bytes_per_s = float("inf")
        self.connections = 0
        self.address = ""
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def reset(self) -> None:
        """Breaks every open connection with RST."""
        for writer in list(self._writers):
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        up: asyncio.StreamWriter | None = None
        try:
            down_reader, up = await asyncio.open_connection(self._host, self._port)
            self._writers.add(up)
            await asyncio.gather(self._pump(reader, up), self._pump(down_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for one in (writer, up):
                if one is not None:
                    self._writers.discard(one)
                    one.close()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(16384):
            while self.blackhole:
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.delay_s + len(data) / self.bytes_per_s)
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()


@contextlib.asynccontextmanager
async def proxy(target: str) -> AsyncIterator[Proxy]:
    one = Proxy(target)
    server = await asyncio.start_server(one._serve, "127.0.0.1", 0)
    one.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield one
    finally:
        server.close()
        for task in list(one._tasks):
            task.cancel()
        await asyncio.gather(*one._tasks, return_exceptions=True)
