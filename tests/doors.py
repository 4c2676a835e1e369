"""A node, a gateway and its worker in one thread of their own, and every door that leads into them.

For the tests of bad input: what comes back is a status and a text, whichever protocol said it.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from cloud.config import GatewayConfig, WorkerConfig
from cloud.gateway import Gateway
from cloud.worker import Worker
from common.transport.oip_grpc import SERVICE
from common.transport.proto import oip_pb2 as pb
from common.transport.servers import ServerOptions
from edge import Node, NodeConfig, StaticModel
from hardware.install import EngineOptions
from tests.bundles import forward, write_bundle
from tests.hostile import KINDS, write_picture_bundle, write_same_bundle

X = np.array([[1.0, 2.0], [-3.0, 0.5]], np.float32)
JSON_X = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": X.ravel().tolist()}
PLACES = ("node", "gateway", "worker")


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: HTTP's status as a number, gRPC's as its name."""

    status: int | str
    text: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is not JSON")

        return json.loads(self.body, parse_constant=refuse)


class HttpDoor:
    def __init__(self, address: str) -> None:
        self._address = address

    def send(self, path: str, body: bytes = b"", headers: dict[str, str] | None = None, method: str = "POST") -> Said:
        connection = (
            _UnixConnection(self._address) if "/" in self._address else http.client.HTTPConnection(self._address)
        )
        try:
            connection.request(method, path, body, headers or {})
            reply = connection.getresponse()
            data = reply.read()
        finally:
            connection.close()
        text = str(json.loads(data).get("error", "")) if reply.status >= 400 else ""
        return Said(reply.status, text, {name.lower(): value for name, value in reply.getheaders()}, data)

    def infer(self, message: Any, model: str = "linear", **headers: str) -> Said:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.send(f"/v2/models/{model}/infer", json.dumps(message).encode(), named)

    def binary(self, head: Any, tail: bytes, model: str = "linear", length: str | None = None) -> Said:
        data = json.dumps(head).encode()
        size = str(len(data)) if length is None else length
        return self.send(f"/v2/models/{model}/infer", data + tail, {"Inference-Header-Content-Length": size})

    def check(self) -> None:
        """A good call is answered exactly."""
        said = self.infer({"inputs": [JSON_X]})
        assert said.status == 200, said
        got = np.array(said.json()["outputs"][0]["data"], np.float32).reshape(2, 3)
        np.testing.assert_allclose(got, forward(X), rtol=1e-6)


class GrpcDoor:
    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)

    def call(self, method: str, message: Any) -> Said:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        try:
            body = self._channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=10)
        except grpc.RpcError as exc:
            return Said(exc.code().name, exc.details())
        return Said("OK", "", {}, body)

    def infer(self, message: Any) -> Said:
        return self.call("ModelInfer", message)

    def check(self) -> None:
        said = self.infer(request())
        assert said.status == "OK", said
        raw = pb.ModelInferResponse.FromString(said.body).raw_output_contents[0]
        np.testing.assert_allclose(np.frombuffer(raw, np.float32).reshape(2, 3), forward(X), rtol=1e-6)


def request(model: str = "linear", *, is_raw: bool = True) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model)
    one = message.inputs.add(name="x", datatype="FP32", shape=X.shape)
    if is_raw:
        message.raw_input_contents.append(X.tobytes())
    else:
        one.contents.fp32_contents.extend(X.ravel().tolist())
    return message


@dataclass(frozen=True, slots=True)
class Doors:
    node: Node
    http: dict[str, HttpDoor]  # by place, for the node's Unix socket "node uds"
    grpc: dict[str, GrpcDoor]
    loop: asyncio.AbstractEventLoop

    def wait(self, call: Any) -> Any:
        """Runs a coroutine where the node lives."""
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(20)


@contextmanager
def open_doors(folder: Path) -> Iterator[Doors]:
    bundles = [write_bundle(folder / "linear"), write_picture_bundle(folder / "pictures")]
    bundles += [write_same_bundle(folder / kind, kind) for kind in KINDS]
    models = tuple(StaticModel(bundle=str(bundle)) for bundle in bundles)
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        opened = asyncio.run_coroutine_threadsafe(_enter(stack, folder, models), loop).result(30)
        yield Doors(*opened, loop)
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _enter(
    stack: AsyncExitStack, folder: Path, models: tuple[StaticModel, ...]
) -> tuple[Node, dict[str, HttpDoor], dict[str, GrpcDoor]]:
    def listen(name: str) -> ServerOptions:
        sockets = {f"{kind}_uds": str(folder / f"{name}-{kind}.sock") for kind in ("http", "grpc")}
        return ServerOptions(http_port=0, grpc_port=0, **sockets)

    engine = EngineOptions(variants=("cpu-int8",), engines=("onnxruntime",), golden_gate=False, threads=1)
    worker = await stack.enter_async_context(
        Worker(WorkerConfig(server=listen("worker"), models=models, engine=engine))
    )
    config = GatewayConfig(workers=(worker.endpoint()["grpc"],), server=listen("gateway"), probe_every_s=0.05)
    gateway = await stack.enter_async_context(Gateway(config))
    node = await stack.enter_async_context(
        Node(NodeConfig(state_dir=str(folder / "state"), server=listen("node"), models=models, engine=engine))
    )
    https, grpcs = {}, {}
    for name, process in zip(PLACES, (node, gateway, worker), strict=True):
        https[name] = HttpDoor(process.endpoint()["http"].removeprefix("http://"))
        grpcs[name] = GrpcDoor(process.endpoint()["grpc"])
    https["node uds"] = HttpDoor(str(folder / "node-http.sock"))
    grpcs["node uds"] = GrpcDoor(f"unix:{folder / 'node-grpc.sock'}")
    return node, https, grpcs


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("node")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)
