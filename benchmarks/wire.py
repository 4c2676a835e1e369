"""The caller of the transport benchmarks: bodies made once, connections as cheap as Python has them, latencies taken.

One client for our servers and for the bare ones, so that it weighs the same on both sides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import cast

import grpc
import numpy as np
import orjson

from common.tensors import Array
from common.transport.oip_json import HEADER_LENGTH
from common.transport.proto import oip_pb2

Call = Callable[[], Awaitable[object]]
GRPC_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_GRPC_OPTIONS = (("grpc.max_receive_message_length", 128 << 20), ("grpc.max_send_message_length", 128 << 20))


class HttpConnection(asyncio.Protocol):
    """One kept-alive HTTP/1.1 connection, one call at a time, answers with a Content-Length only."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._need = 0
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._need:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            self._need = end + 4 + _content_length(bytes(self._data[:end]))
        if len(self._data) >= self._need and self._answer is not None and not self._answer.done():
            self._answer.set_result(bytes(self._data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the server closed the connection"))

    async def call(self, request: bytes) -> bytes:
        """Sends a whole request; the answer's body. Raises `RuntimeError` for any status but 200."""
        self._data.clear()
        self._need = 0
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        answer = await self._answer
        head, _, body = answer.partition(b"\r\n\r\n")
        if b" 200 " not in head[:16]:
            raise RuntimeError(f"{head[:80]!r}: {body[:200]!r}")
        return body

    def close(self) -> None:
        self._transport.close()


async def http_connection(address: str) -> HttpConnection:
    """`address` is `http://HOST:PORT` or the path of a Unix socket."""
    loop = asyncio.get_running_loop()
    if address.startswith("http://"):
        host, _, port = address.removeprefix("http://").rpartition(":")
        _, connection = await loop.create_connection(HttpConnection, host, int(port))
    else:
        _, connection = await loop.create_unix_connection(HttpConnection, address)
    return connection


def grpc_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=_GRPC_OPTIONS)


def grpc_call(channel: grpc.aio.Channel, message: bytes) -> Call:
    """A unary call of bytes: neither side of the client parses anything."""
    method = channel.unary_unary(GRPC_METHOD)

    async def call() -> object:
        return await method(message)

    return call


def http_request(model: str, body: bytes, header_length: int | None = None) -> bytes:
    kind = "application/json" if header_length is None else "application/octet-stream"
    extra = "" if header_length is None else f"{HEADER_LENGTH}: {header_length}\r\n"
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{extra}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def json_request(model: str, array: Array) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(array.shape), "data": array.ravel()}
    return http_request(model, orjson.dumps({"inputs": [tensor]}, option=orjson.OPT_SERIALIZE_NUMPY))


def binary_request(model: str, array: Array) -> bytes:
    size = {"binary_data_size": array.nbytes}
    tensor = {"name": "x", "datatype": "FP32", "shape": list(array.shape), "parameters": size}
    head = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    return http_request(model, head + array.tobytes(), len(head))


def grpc_request(model: str, array: Array) -> bytes:
    message = oip_pb2.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=array.shape)
    return bytes(message.SerializeToString())


async def latencies(calls: Sequence[Call], count: int) -> list[float]:
    """Seconds of each of `count` calls in all, the given ones kept busy side by side."""
    share = max(1, count // len(calls))

    async def one(call: Call) -> list[float]:
        seconds = []
        for _ in range(share):
            start = time.perf_counter()
            await call()
            seconds.append(time.perf_counter() - start)
        return seconds

    return [second for part in await asyncio.gather(*map(one, calls)) for second in part]


def percentile(seconds: Sequence[float], percent: float) -> float:
    return float(np.percentile(np.asarray(seconds), percent))


def socket_path(folder: Path, name: str) -> str:
    return str(folder / f"{name}.sock")


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        if line[:15].lower() == b"content-length:":
            return int(line[15:])
    raise RuntimeError(f"no Content-Length in {head[:200]!r}")
