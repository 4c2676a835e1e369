"""The fuzz run's side of the sockets: sends bytes, waits for what comes back, and says whether that was an answer.

Knows HTTP only as far as a reader of answers must. Whatever is no valid answer raises `NoAnswer`.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib
from dataclasses import dataclass
from typing import Any

DEADLINE_S = 20.0  # generous: the machine may be busy with other things
LINGER_S = 0.05  # how long bytes that may be half a request wait for an answer before this side is closed


class NoAnswer(Exception):
    """What came back is not a valid answer, or nothing came."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


class HttpSocket:
    """One connection at a time to an address ("host:port" or the path of a Unix socket), opened when needed."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, data: bytes) -> Reply:
        """The answer to one whole request."""
        for attempt in (1, 2):
            is_new = self._writer is None
            try:
                async with asyncio.timeout(DEADLINE_S):
                    reader, writer = await self._open()
                    writer.write(data)
                    await writer.drain()
                    reply = await read_reply(reader, is_head=data.startswith(b"HEAD "))
            except (ConnectionError, asyncio.IncompleteReadError) as exc:
                self.close()
                if is_new or attempt == 2:
                    raise NoAnswer(f"the connection broke: {exc!r}") from exc
                continue  # the server closed an idle connection: the request was never read
            except TimeoutError as exc:
                raise NoAnswer(f"no answer within {DEADLINE_S} s") from exc
            if reply.headers.get("connection", "").lower() == "close":
                self.close()
            return reply
        raise AssertionError

    async def throw(self, data: bytes) -> list[Reply]:
        """The answers to whatever these bytes are, on a connection of their own; none where they are half a request."""
        reader, writer = await _connect(self._address)
        is_head = data.startswith(b"HEAD ")
        replies: list[Reply] = []
        try:
            async with asyncio.timeout(DEADLINE_S):
                try:
                    writer.write(data)
                    await writer.drain()
                    async with asyncio.timeout(LINGER_S):
                        replies.append(await read_reply(reader, is_head=is_head))
                except TimeoutError:
                    writer.write_eof()
                except ConnectionError:
                    return replies  # refused without a word: bytes that are no request
                if replies:
                    writer.write_eof()
                while not reader.at_eof():
                    replies.append(await read_reply(reader, is_head=is_head))
        except (asyncio.IncompleteReadError, ConnectionError) as exc:
            if getattr(exc, "partial", b"") and not replies:
                raise NoAnswer(f"half an answer: {exc!r}") from exc
        except TimeoutError as exc:
            raise NoAnswer(f"neither answered nor closed within {DEADLINE_S} s") from exc
        finally:
            writer.close()
        return replies

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await _connect(self._address)
        return self._reader, self._writer


async def throw_raw(address: str, data: bytes) -> None:
    """Bytes for a server that is not HTTP/1: it may say what it likes, and has to close once this side has."""
    reader, writer = await _connect(address)
    try:
        async with asyncio.timeout(DEADLINE_S):
            writer.write(data)
            writer.write_eof()
            while await reader.read(65536):
                pass
    except ConnectionError:
        pass
    except TimeoutError as exc:
        raise NoAnswer(f"not closed within {DEADLINE_S} s") from exc
    finally:
        writer.close()


async def read_reply(reader: asyncio.StreamReader, *, is_head: bool) -> Reply:
    head = await _head(reader)
    line, *fields = head.split("\r\n")
    found = re.fullmatch(r"HTTP/[0-9]\.[0-9] ([1-5][0-9][0-9]) [ -~]+", line)
    if found is None:
        raise NoAnswer(f"no status line: {line[:80]!r}")
    status = int(found[1])
    if status == 100:
        return await read_reply(reader, is_head=is_head)
    headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    body = b"" if is_head or status in (204, 304) else await _body(reader, headers)
    if (coding := headers.get("content-encoding")) and body:
        body = gzip.decompress(body) if coding == "gzip" else zlib.decompress(body)
    return Reply(status, headers, body)


def checked(reply: Reply) -> None:
    """Raises `NoAnswer` for what no caller should get."""
    if reply.status >= 500 and reply.status not in (501, 503, 505):
        raise NoAnswer(f"{reply.status}: {reply.body[:300]!r}")
    if reply.status == 503 and "retry-after" not in reply.headers:
        raise NoAnswer(f"503 without Retry-After: {reply.body[:300]!r}")
    if not reply.body:
        return
    if reply.headers.get("content-type", "").startswith("application/json"):
        said = _json(reply.body)
        if reply.status >= 400 and "error" not in said and "ready" not in said:
            raise NoAnswer(f"{reply.status} without a message: {reply.body[:300]!r}")
    elif "inference-header-content-length" in reply.headers:
        size = int(reply.headers["inference-header-content-length"])
        outputs = _json(reply.body[:size])["outputs"]
        sizes = [one["parameters"]["binary_data_size"] for one in outputs if "data" not in one]
        if size + sum(sizes) != len(reply.body):
            raise NoAnswer(f"sizes {sizes} after {size} in a body of {len(reply.body)} bytes")


def _json(data: bytes) -> Any:
    def refuse(word: str) -> None:
        raise NoAnswer(f"{word} is not JSON")

    try:
        return json.loads(data, parse_constant=refuse)
    except ValueError as exc:
        raise NoAnswer(f"not JSON: {data[:200]!r}") from exc


async def _head(reader: asyncio.StreamReader) -> str:
    data = await reader.readuntil(b"\r\n\r\n")
    return data[:-4].decode("latin-1")


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", ""):
        parts = []
        while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
            parts.append((await reader.readexactly(size + 2))[:-2])
        await reader.readexactly(2)
        return b"".join(parts)
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return await reader.read()


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("/"):
        return await asyncio.open_unix_connection(address)
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))
