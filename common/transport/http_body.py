"""The body of an HTTP request: as large as is allowed, inflated where it is compressed, and only as long as it comes.

aiohttp would inflate on the event loop, and as much as the sender likes; here what is inflated never gets larger than
the limit, and more than a little is inflated in threads of its own. What fails is an `aiohttp.web` error with its text.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import StreamReader, web

from common.errors import InvalidInput

CODINGS = ("gzip", "deflate")
SILENCE_S = 75.0  # a body of which nothing comes for so long is given up, as a connection that says nothing is
CHUNK_BYTES = 64 << 10
_HERE_BYTES = 64 << 10  # bodies that inflate to more are inflated off the event loop
_MAX_MEMBERS = 4096  # of a gzip body, which may be several, one after the other
_inflating = ThreadPoolExecutor(max_workers=2, thread_name_prefix="inflate")  # few: each may hold a largest body

T = TypeVar("T")


async def read_body(request: web.Request) -> bytes:
    """The whole body, inflated. Raises 408, 413 and 415, and `InvalidInput` for what is not compressed as it says."""
    coding = _coding(request)
    body = bytearray()
    while chunk := await heard(request.content.readany()):
        body += chunk
        if len(body) > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(request.client_max_size, len(body))
    if not coding or not body:
        return bytes(body)
    return await _inflated(bytes(body), coding, request.client_max_size)


async def open_body(request: web.Request) -> StreamReader:
    """The inflated body to be read bit by bit (`heard` is for the waiting); who reads it counts the bytes."""
    if not _coding(request):
        return request.content
    body = await read_body(request)
    stream = StreamReader(request.protocol, limit=len(body) + 1, loop=asyncio.get_running_loop())
    for at in range(0, len(body), CHUNK_BYTES):
        stream.feed_data(body[at : at + CHUNK_BYTES])
    stream.feed_eof()
    return stream


async def heard(coming: Awaitable[T]) -> T:
    """What comes from the sender. Raises 408 when nothing does."""
    try:
        async with asyncio.timeout(SILENCE_S) as silence:
            return await coming
    except TimeoutError as exc:
        if not silence.expired():
            raise
        raise web.HTTPRequestTimeout(text=f"the body is not complete, and nothing came for {SILENCE_S:g} s") from exc


def inflate(data: bytes, coding: str, limit: int) -> bytes | None:
    """None where that is more than `limit` bytes. Raises `InvalidInput` for damaged data.

    `deflate` is zlib's form (RFC 9110, 8.4.1.2), or without its header, as some senders have it.
    """
    window_bits = 31 if coding == "gzip" else 15 if data[0] & 15 == 8 else -15
    parts: list[bytes] = []
    left, members, stream = limit, 1, zlib.decompressobj(window_bits)
    for at in range(0, len(data), CHUNK_BYTES):
        chunk = data[at : at + CHUNK_BYTES]
        while chunk:
            if stream.eof:
                if coding != "gzip" or members == _MAX_MEMBERS:
                    raise _damaged(coding, "more follows its end")
                members, stream = members + 1, zlib.decompressobj(window_bits)
            try:
                parts.append(stream.decompress(chunk, left + 1))
            except zlib.error as exc:
                raise _damaged(coding, str(exc)) from exc
            left -= len(parts[-1])
            if left < 0:
                return None
            chunk = stream.unused_data
    if not stream.eof:
        raise _damaged(coding, "it ends too early")
    return b"".join(parts)


async def _inflated(data: bytes, coding: str, limit: int) -> bytes:
    body = inflate(data, coding, min(limit, _HERE_BYTES)) if len(data) <= _HERE_BYTES else None
    if body is None and limit > _HERE_BYTES:
        body = await asyncio.get_running_loop().run_in_executor(_inflating, inflate, data, coding, limit)
    if body is None:
        raise web.HTTPRequestEntityTooLarge(limit, limit + 1)
    return body


def _coding(request: web.Request) -> str:
    """Empty where the body is as it is. Raises 415."""
    said = ", ".join(request.headers.getall("Content-Encoding", ()))
    coding = said.strip().lower()
    if coding in ("", "identity"):
        return ""
    if coding not in CODINGS:
        raise web.HTTPUnsupportedMediaType(
            headers={"Accept-Encoding": ", ".join(CODINGS)},
            text=f"Content-Encoding: {said[:40]!r} is not known; accepted: {' or '.join(CODINGS)}, or no such header",
        )
    return coding


def _damaged(coding: str, problem: str) -> InvalidInput:
    return InvalidInput("body", f"it is not the {coding} data that Content-Encoding says: {problem}")
