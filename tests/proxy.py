"""A small TCP proxy between two processes of a test, which misbehaves on demand: slow, silent, broken."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator


class Proxy:
    """Forwards to `target` (host:port). Its modes may be changed at any time; connections that are open follow.

    `blackhole`: accepts and reads, answers nothing. `mute`: what the client says arrives, the answers are lost.
    `delay_s`: holds each piece back for so long, either way. `bytes_per_s`: a throttled link. `cut_after`: that many
    bytes of answers still pass on a connection, then it is reset in the middle.
    """

    def __init__(self, target: str) -> None:
        self.lead_to(target)
        self.blackhole = self.mute = False
        self.delay_s = 0.0
        self.bytes_per_s = float("inf")
        self.cut_after: int | None = None
        self.connections = 0
        self.answer_bytes = 0  # that were passed on to callers
        self.cuts = 0  # made by `cut_after`
        self.address = ""
        self._writers: set[asyncio.StreamWriter] = set()  # of both sides
        self._callers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def lead_to(self, target: str) -> None:
        """Where new connections go."""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)

    def reset(self) -> None:
        """Breaks every open connection with RST."""
        for writer in list(self._writers):
            _reset(writer)

    def half_close(self) -> None:
        """The server side says that it will send nothing more, and goes on reading."""
        for writer in list(self._callers):
            with contextlib.suppress(OSError):
                writer.write_eof()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self._callers.add(writer)
        up: asyncio.StreamWriter | None = None
        try:
            down_reader, up = await asyncio.open_connection(self._host, self._port)
            self._writers.add(up)
            await asyncio.gather(self._pump(reader, up), self._pump(down_reader, writer, is_answer=True))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._callers.discard(writer)
            for one in (writer, up):
                if one is not None:
                    self._writers.discard(one)
                    one.close()
            self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool = False
    ) -> None:
        passed = 0
        while data := await reader.read(16384):
            while self.blackhole:
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.delay_s + len(data) / self.bytes_per_s)
            if is_answer and self.mute:
                continue
            if is_answer and self.cut_after is not None and passed + len(data) > self.cut_after:
                left = data[: max(0, self.cut_after - passed)]
                self.answer_bytes, self.cuts = self.answer_bytes + len(left), self.cuts + 1
                writer.write(left)
                await asyncio.sleep(0.01)  # what was written leaves before the reset
                _reset(writer)
                return
            passed += len(data)
            self.answer_bytes += len(data) if is_answer else 0
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.asynccontextmanager
async def proxy(target: str, kind: type[Proxy] = Proxy) -> AsyncIterator[Proxy]:
    one = kind(target)
    server = await asyncio.start_server(one._serve, "127.0.0.1", 0)
    one.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield one
    finally:
        server.close()
        for task in list(one._tasks):
            task.cancel()
        await asyncio.gather(*one._tasks, return_exceptions=True)
