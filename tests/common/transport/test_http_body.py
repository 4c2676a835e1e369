"""Bodies that are compressed, that inflate to more than is allowed, and that stop coming."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidInput
from common.transport import http_body, http_server
from common.transport.http_body import inflate
from common.transport.http_server import serve_http
from tests.common.transport.conftest import Served
from tests.common.transport.fakes import FakeTarget, plane

INFER = "/v2/models/double/infer"
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [2]}]}).encode()
FORM_TYPE = {"Content-Type": "multipart/form-data; boundary=b"}


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def form(*pictures: bytes) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="image"; filename="p"\r\n\r\n'
    return b"".join(head + picture + b"\r\n" for picture in pictures) + b"--b--\r\n"


@given(data=st.binary(max_size=300_000), members=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_what_was_compressed_comes_back(data: bytes, members: int) -> None:
    assert inflate(gzip.compress(data) * members, "gzip", 1 << 20) == data * members
    assert inflate(zlib.compress(data), "deflate", len(data)) == data
    assert inflate(raw_deflate(data), "deflate", len(data)) == data
    if data:
        assert inflate(gzip.compress(data), "gzip", len(data) - 1) is None


@pytest.mark.parametrize(
    ("data", "coding"),
    [
        (b"not gzip", "gzip"),
        (gzip.compress(BODY, mtime=0)[:-3], "gzip"),
        (gzip.compress(BODY, mtime=0) + b"more", "gzip"),
        (gzip.compress(BODY, mtime=0)[:-8] + bytes(8), "gzip"),  # another checksum
        (gzip.compress(b"", mtime=0) * 10_000, "gzip"),
        (zlib.compress(BODY)[:-3], "deflate"),
        (zlib.compress(BODY) * 2, "deflate"),
        (gzip.compress(BODY, mtime=0), "deflate"),
    ],
)
def test_damaged_data_is_refused(data: bytes, coding: str) -> None:
    with pytest.raises(InvalidInput, match=f"body: it is not the {coding} data"):
        inflate(data, coding, 1 << 20)


def test_a_bomb_is_never_inflated_to_more_than_the_limit() -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        assert inflate(bomb, "gzip", 1 << 20) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 << 20


async def test_a_bomb_is_413_and_its_neighbours_are_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of it the event loop inflates 64 KiB at most."""
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(9)) + packer.flush()
    monkeypatch.setattr(http_server, "MAX_BODY_BYTES", 8 << 20)
    inflated: list[tuple[int, bool]] = []

    def watched(data: bytes, coding: str, limit: int) -> bytes | None:
        inflated.append((limit, threading.current_thread() is threading.main_thread()))
        return inflate(data, coding, limit)

    monkeypatch.setattr(http_body, "inflate", watched)
    async with serve_http(plane(FakeTarget())) as server, aiohttp.ClientSession(server.addresses[0]) as session:
        for path, kind in ((INFER, {}), ("/v2/models/echo/classify", FORM_TYPE)):
            async with session.post(path, data=bomb, headers=kind | {"Content-Encoding": "gzip"}) as reply:
                assert reply.status == 413
                assert "larger than" in (await reply.json())["error"]
    assert inflated == [(64 << 10, True), (8 << 20, False)] * 2


@pytest.mark.parametrize("coding", ["gzip", "deflate", "raw", "identity", "GZIP"])
async def test_every_route_with_a_body_takes_it_compressed(served: Served, coding: str) -> None:
    ways: dict[str, Callable[[bytes], bytes]] = {"deflate": zlib.compress, "raw": raw_deflate, "identity": bytes}
    compress = ways.get(coding, gzip.compress)
    said = {"Content-Encoding": {"raw": "deflate"}.get(coding, coding)}
    async with aiohttp.ClientSession(f"http://{served.http}") as session:
        async with session.post(INFER, data=compress(BODY), headers=said) as reply:
            assert (await reply.json())["outputs"][0]["data"] == [4.0]
        async with session.post("/v2/repository/index", data=compress(b'{"ready": "x"}'), headers=said) as reply:
            assert "ready" in (await reply.json())["error"]
        picture = {"Content-Type": "image/png"}
        for data, kind in ((b"one", picture), (form(b"one", b"two" * 100_000), FORM_TYPE)):
            url = "/v2/models/classes/classify"
            async with session.post(url, data=compress(data), headers=said | kind) as reply:
                assert "body" not in (await reply.text())
    inputs = [request.inputs["image"].tolist() for request in served.target.requests if "image" in request.inputs]
    assert inputs == [[b"one"], [b"one", b"two" * 100_000]]


@pytest.mark.parametrize("coding", ["foo", "br", "gzip, gzip", "gzip, identity"])
@pytest.mark.parametrize(
    "path", ["double/infer", "double/classify", "../repository/index", "../repository/models/double/load"]
)
async def test_an_unknown_coding_is_415_that_says_which_are_known(served: Served, coding: str, path: str) -> None:
    kind = FORM_TYPE if "classify" in path else {}
    async with (
        aiohttp.ClientSession(f"http://{served.http}") as session,
        session.post(f"/v2/models/{path}", data=b"x", headers=kind | {"Content-Encoding": coding}) as reply,
    ):
        assert (reply.status, reply.headers["Accept-Encoding"]) == (415, "gzip, deflate")
        assert repr(coding) in (await reply.json())["error"]


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v2/models/double/infer HTTP/1.1\r\nContent-Length: 9000000\r\n\r\n{",
        b"POST /v2/models/double/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        b"POST /v2/models/double/classify HTTP/1.1\r\nContent-Length: 9000\r\nContent-Type: image/png\r\n\r\n{",
        b"POST /v2/models/double/classify HTTP/1.1\r\nContent-Length: 9000\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + form(b"one")[:-7],
        b"POST /v2/models/double/classify HTTP/1.1\r\nContent-Length: 9000\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b",
    ],
)
async def test_a_body_that_stops_coming_is_408_and_its_connection_ends(
    served: Served, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(http_body, "SILENCE_S", 0.1)
    reader, writer = await asyncio.open_unix_connection(str(served.uds))
    writer.write(head.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nHost: h\r\n"))
    async with asyncio.timeout(8):
        said = await reader.read()  # until the server closes
    writer.close()
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"nothing came for 0.1 s" in said
    assert not served.target.requests


async def test_a_body_that_comes_slowly_is_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "SILENCE_S", 0.6)

    async def slowly() -> AsyncIterator[bytes]:
        for at in range(0, len(BODY), 20):
            yield BODY[at : at + 20]
            await asyncio.sleep(0.2)

    async with (
        aiohttp.ClientSession(f"http://{served.http}") as session,
        session.post(INFER, data=slowly()) as reply,
    ):
        assert reply.status == 200
