"""The short way of a plain infer call: it answers as the library's way does, and leaves to the library what is odd."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import uvloop

from common.transport import http_infer
from common.transport.http_server import serve_http
from tests.common.transport.conftest import Served
from tests.common.transport.fakes import FakeTarget, plane

BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.5]}]}).encode()


def call(model: str = "double", body: bytes = BODY, *lines: str, start: str = "") -> bytes:
    first = start or f"POST /v2/models/{model}/infer HTTP/1.1"
    return "\r\n".join((first, "Host: here", f"Content-Length: {len(body)}", *lines, "", "")).encode() + body


class Wire:
    """One connection, and answers read from it as bytes say."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(5):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            line, *fields = head.strip().split("\r\n")
            headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(line.split()[1]), headers, body

    async def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        self.writer.write(data)
        return await self.answer()


async def connected(port: int) -> Wire:
    return Wire(*await asyncio.open_connection("127.0.0.1", port))


@pytest.fixture
async def wire(served: Served) -> AsyncIterator[Wire]:
    async with await connected(int(served.http.split(":")[1])) as one:
        yield one


def values(body: bytes) -> list[float]:
    return json.loads(body)["outputs"][0]["data"]


@pytest.mark.parametrize("model", ["double", "no-such", "full", "sick", "buggy", "narrow"])
@pytest.mark.parametrize("body", [BODY, b"{", b'{"inputs": []}'])
async def test_both_ways_answer_the_same(wire: Wire, model: str, body: bytes) -> None:
    request = call(model, body, "x-outrider-request-id: r1")
    answers = [await wire.ask(request)]
    await wire.ask(b"GET /v2/health/live HTTP/1.1\r\nHost: here\r\n\r\n")
    answers.append(await wire.ask(request))
    for _, headers, _ in answers:
        for name in ("date", "server"):
            headers.pop(name, None)
    assert answers[0] == answers[1]


async def test_calls_in_one_packet_are_answered_in_their_order(wire: Wire) -> None:
    wire.writer.write(call("double") + call("no-such") + call("echo"))
    answers = [await wire.answer() for _ in range(3)]
    assert [status for status, _, _ in answers] == [200, 404, 200]
    assert [values(answers[i][2]) for i in (0, 2)] == [[2.0, 5.0], [1.0, 2.5]]


@pytest.mark.parametrize("cut", [10, 60, 90, len(call()) - 1])
async def test_a_call_in_two_packets_is_one_call(wire: Wire, cut: int) -> None:
    for _ in range(2):
        wire.writer.write(call()[:cut])
        await asyncio.sleep(0.02)
        status, _, body = await wire.ask(call()[cut:])
        assert (status, values(body)) == (200, [2.0, 5.0])


async def test_what_follows_something_odd_is_answered_too(wire: Wire) -> None:
    assert (await wire.ask(call()))[0] == 200
    wire.writer.write(
        call("slow", BODY, "x-outrider-deadline-ms: 50") + b"GET /v2 HTTP/1.1\r\nHost: here\r\n\r\n" + call()
    )
    answers = [await wire.answer() for _ in range(3)]
    assert [status for status, _, _ in answers] == [503, 200, 200]
    assert values(answers[2][2]) == [2.0, 5.0]


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (call("double", BODY, "Content-Length: 3"), 400),
        (call("double", BODY, "x-outrider-priority: batch", "x-outrider-priority: batch"), 400),
        (call("double", BODY, "Bad Header: x"), 400),
        (call("double", BODY, "Expect: tea"), 417),
        (call("d%6fuble"), 200),
        (call(start="POST /v2/models/double/infer?x=1 HTTP/1.1"), 200),
        (call(start="POST /v2/models/double/infer HTTP/1.0"), 200),
        (call("double", BODY, "Connection: close"), 200),
        (call("double", BODY, "Accept-Encoding: gzip"), 200),
        (call().replace(b"Content-Length: %d" % len(BODY), b"Transfer-Encoding: chunked").replace(
            BODY, b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)), 200),
    ],
)  # fmt: skip
async def test_what_is_not_plain_is_the_librarys_to_answer(wire: Wire, request_bytes: bytes, status: int) -> None:
    said, headers, _ = await wire.ask(request_bytes)
    assert said == status
    assert "server" in headers  # aiohttp names itself


async def test_a_connection_that_is_cut_cancels_its_call(served: Served, wire: Wire) -> None:
    wire.writer.write(call("slow"))
    async with asyncio.timeout(5):
        await served.target.started.wait()
        wire.writer.transport.abort()
        await served.target.was_cancelled.wait()


@pytest.mark.parametrize("ahead", [0, 30_000, 300_000, 1_500_000])
async def test_a_caller_who_leaves_is_noticed_whatever_was_sent_ahead(served: Served, wire: Wire, ahead: int) -> None:
    wire.writer.write(call("slow"))
    async with asyncio.timeout(5):
        await served.target.started.wait()
        wire.writer.write(call("echo", b" " * 200_000)[:ahead] if ahead <= 200_000 else call() * (ahead // len(call())))
        await asyncio.sleep(0.1)
        wire.writer.transport.abort()
        await served.target.was_cancelled.wait()


async def test_half_a_head_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_infer, "_IDLE_S", 0.1)
    async with serve_http(plane(FakeTarget()), drain_s=1.0) as server:
        for half in (b"POST /v2/models/echo/inf", b"GET /v2", call()[:-1]):
            async with await connected(server.port) as wire, asyncio.timeout(5):
                wire.writer.write(half)
                assert await wire.reader.read() == b""


async def test_a_connection_that_says_nothing_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_infer, "_IDLE_S", 0.1)
    async with serve_http(plane(FakeTarget()), drain_s=1.0) as server, await connected(server.port) as wire:
        assert (await wire.ask(call()))[0] == 200
        async with asyncio.timeout(5):
            assert await wire.reader.read() == b""


async def test_a_server_that_closes_answers_what_is_in_progress() -> None:
    target = FakeTarget()
    async with contextlib.AsyncExitStack() as stack:
        async with serve_http(plane(target), drain_s=5.0) as server:
            wire = await stack.enter_async_context(await connected(server.port))
            wire.writer.write(call("slow", BODY, "x-outrider-deadline-ms: 100"))
            await target.started.wait()
        assert (await wire.answer())[0] == 503
        assert await wire.reader.read() == b""


async def test_a_caller_who_does_not_read_is_not_worked_for(served: Served, wire: Wire) -> None:
    rows = json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [20000], "data": [0.25] * 20000}]}
    ).encode()
    wire.writer.write(call("echo", rows) * 400)
    seen = -1
    async with asyncio.timeout(20):
        while len(served.target.requests) != seen:  # until nothing happens any more
            seen = len(served.target.requests)
            await asyncio.sleep(0.3)
        assert seen < 400
        for _ in range(400):
            assert (await wire.answer())[0] == 200


def test_on_the_loop_that_the_processes_use_it_answers_too() -> None:
    async def main() -> Any:
        async with serve_http(plane(FakeTarget()), drain_s=1.0) as server, await connected(server.port) as wire:
            plain = await wire.ask(call())
            async with aiohttp.ClientSession(server.addresses[0]) as session, session.get("/v2") as reply:
                return plain, reply.status

    (status, headers, body), other = uvloop.run(main())
    assert (status, values(body), other) == (200, [2.0, 5.0], 200)
    assert "server" not in headers
