"""One contract over every way to call a model: in process, and over HTTP and gRPC at a node and at a gateway.

The callers are the stock clients; what they get must not depend on which way it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from cloud.config import GatewayConfig, WorkerConfig
from cloud.gateway import Gateway
from cloud.worker import Worker
from common.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable
from common.transport import oip_config
from common.transport.servers import ServerOptions
from edge import Node, NodeConfig, StaticModel
from tests.bundles import forward, write_bundle

LISTEN = ServerOptions(http_port=0, grpc_port=0)
X = np.array([[1.0, 2.0], [-3.0, 0.5]], np.float32)

Arrays = dict[str, np.ndarray]


class Refused(Exception):
    """A call that failed, as every way says it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Caller(Protocol):
    """`infer` gives the outputs by name and the version that answered. Both raise `Refused`."""

    async def infer(self, model: str, inputs: Arrays, **said: Any) -> tuple[Arrays, str]: ...

    async def config(self, model: str) -> dict[str, Any]: ...

    async def is_ready(self, model: str) -> bool: ...


class InProcess:
    KINDS: ClassVar = {
        InvalidRequest: "invalid",
        NotFound: "not found",
        DeadlineExceeded: "late",
        Unavailable: "unavailable",
    }

    def __init__(self, node: Node) -> None:
        self.node = node

    async def infer(self, model: str, inputs: Arrays, **said: Any) -> tuple[Arrays, str]:
        try:
            answer = await self.node.infer(model, inputs, **said)
        except tuple(self.KINDS) as exc:
            raise Refused(next(k for error, k in self.KINDS.items() if isinstance(exc, error)), str(exc)) from exc
        return dict(answer.outputs), answer.stamp.version

    async def config(self, model: str) -> dict[str, Any]:
        try:
            return oip_config.render(await self.node.dataplane.catalog.metadata(model, None))
        except NotFound as exc:
            raise Refused("not found", str(exc)) from exc

    async def is_ready(self, model: str) -> bool:
        return await self.node.dataplane.catalog.is_model_ready(model, None)


class Stock:
    """A stock client, over HTTP or gRPC."""

    KINDS: ClassVar = {
        "400": "invalid",
        "404": "not found",
        "503": "unavailable",  # or late, says the text
        "StatusCode.INVALID_ARGUMENT": "invalid",
        "StatusCode.NOT_FOUND": "not found",
        "StatusCode.UNAVAILABLE": "unavailable",
        "StatusCode.DEADLINE_EXCEEDED": "late",
    }

    def __init__(self, client: Any, kinds: Any) -> None:
        self.client, self.kinds = client, kinds

    async def infer(self, model: str, inputs: Arrays, **said: Any) -> tuple[Arrays, str]:
        tensors = [
            self.kinds.InferInput(name, list(x.shape), np_to_triton_dtype(x.dtype)).set_data_from_numpy(x)
            for name, x in inputs.items()
        ]
        wanted = [
            self.kinds.InferRequestedOutput(name, class_count=said.get("classes", 0))
            for name in said.get("outputs", ())
        ]
        options: dict[str, Any] = {"model_version": said.get("pin") or "", "outputs": wanted or None}
        if "timeout_s" in said:
            options["timeout"] = round(said["timeout_s"] * 1e6)
        if "priority" in said:
            options["priority"] = said["priority"]
        answer = await self._ask(self.client.infer(model, tensors, **options))
        message = answer.get_response()
        if isinstance(message, dict):
            names, version = [out["name"] for out in message["outputs"]], message["model_version"]
        else:
            names, version = [out.name for out in message.outputs], message.model_version
        return {name: answer.as_numpy(name) for name in names}, version

    async def config(self, model: str) -> dict[str, Any]:
        if self.kinds is triton_http:
            return dict(await self._ask(self.client.get_model_config(model)))
        config = (await self._ask(self.client.get_model_config(model, as_json=True)))["config"]
        for tensor in config["input"] + config["output"]:
            tensor["dims"] = [int(size) for size in tensor["dims"]]  # protobuf's JSON writes int64 as strings
        return dict(config)

    async def is_ready(self, model: str) -> bool:
        return bool(await self._ask(self.client.is_model_ready(model)))

    async def _ask(self, call: Any) -> Any:
        try:
            return await call
        except InferenceServerException as exc:
            kind = "late" if "deadline passed" in str(exc.message()) else self.KINDS[str(exc.status())]
            raise Refused(kind, str(exc.message())) from exc


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(params=["in process", "node http", "node grpc", "gateway http", "gateway grpc"])
async def caller(request: pytest.FixtureRequest, bundle: Path, tmp_path: Path) -> AsyncIterator[Caller]:
    where, _, wire = request.param.partition(" ")
    models = (StaticModel(bundle=str(bundle), version="7"),)
    async with AsyncExitStack() as stack:
        process: Node | Gateway
        if where == "gateway":
            grpc = ServerOptions(grpc_port=0)
            worker = await stack.enter_async_context(Worker(WorkerConfig(name="worker", server=grpc, models=models)))
            address = worker.endpoint()["grpc"]
            config = GatewayConfig(workers=(address,), server=LISTEN, probe_every_s=0.05)
            process = await stack.enter_async_context(Gateway(config))
            await _until(process.dataplane.is_ready)
        else:
            node_config = NodeConfig(name="node", state_dir=str(tmp_path), server=LISTEN, models=models)
            process = await stack.enter_async_context(Node(node_config))
        if wire == "process":
            assert isinstance(process, Node)
            yield InProcess(process)
            return
        address = process.endpoint()[wire].removeprefix("http://")
        library = {"http": (http_aio, triton_http), "grpc": (grpc_aio, triton_grpc)}[wire]
        client = library[0].InferenceServerClient(address)
        stack.push_async_callback(client.close)
        yield Stock(client, library[1])


async def _until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_true():
            await asyncio.sleep(0.01)


async def test_right_values_of_the_version_that_serves(caller: Caller) -> None:
    outputs, version = await caller.infer("linear", {"x": X})
    assert (list(outputs), version) == (["logits"], "7")
    assert outputs["logits"].dtype == np.float32
    np.testing.assert_allclose(outputs["logits"], forward(X), rtol=1e-6)
    _, version = await caller.infer("linear", {"x": X}, pin="7", outputs=("logits",), priority=1, timeout_s=30.0)
    assert version == "7"


async def test_classes_are_the_models_own_labels(caller: Caller) -> None:
    outputs, _ = await caller.infer("linear", {"x": X}, outputs=("logits",), classes=1)
    [[first], [second]] = outputs["logits"].tolist()
    assert (first.split(b":")[2], second.split(b":")[2]) == (b"right", b"middle")


async def test_configuration_is_the_bundles(caller: Caller) -> None:
    config = await caller.config("linear")
    assert config.pop("platform").startswith("onnxruntime_")
    assert config == {
        "name": "linear",
        "backend": "onnxruntime",
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}],
        "output": [{"name": "logits", "data_type": "TYPE_FP32", "dims": [3]}],
    }
    assert await caller.is_ready("linear")


@pytest.mark.parametrize(
    ("model", "inputs", "said", "kind"),
    [
        ("nothing", {"x": X}, {}, "not found"),
        ("linear", {"x": X}, {"pin": "8"}, "not found"),
        ("linear", {"y": X}, {}, "invalid"),
        ("linear", {"x": X, "y": X}, {}, "invalid"),
        ("linear", {"x": X.astype(np.float64)}, {}, "invalid"),
        ("linear", {"x": X[:, :1]}, {}, "invalid"),
        ("linear", {"x": X[0]}, {}, "invalid"),
        ("linear", {"x": X}, {"outputs": ("nope",)}, "invalid"),
        ("linear", {"x": np.ones((9, 2), np.float32)}, {}, "invalid"),
    ],
)
async def test_wrong_call_has_the_same_answer_everywhere(
    caller: Caller, model: str, inputs: Arrays, said: dict[str, Any], kind: str
) -> None:
    with pytest.raises(Refused) as caught:
        await caller.infer(model, inputs, **said)
    assert caught.value.kind == kind, str(caught.value)
    outputs, _ = await caller.infer("linear", {"x": X})  # and the process goes on
    np.testing.assert_allclose(outputs["logits"], forward(X), rtol=1e-6)


async def test_configuration_of_an_unknown_model_is_not_found(caller: Caller) -> None:
    with pytest.raises(Refused) as caught:
        await caller.config("nothing")
    assert caught.value.kind == "not found"
