"""A real worker: torch from a factory that its own config names, ONNX Runtime where a bundle has only that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.torch import save_file

from cloud.config import GatewayConfig, StaticModel, WorkerConfig
from cloud.gateway import Gateway
from cloud.worker import Worker
from common.bundle import BundleSpec, GoldenSpec, ModelConfig, Variant, write_spec
from common.config import parse
from common.errors import ConfigError, IncompatibleRelease, InvalidRequest
from common.request import Context, Reason, Request
from common.tensorfile import write_tensors
from common.tensors import TensorSpec
from common.transport.grpc_client import OipClient
from common.transport.servers import ServerOptions
from hardware.install import EngineOptions

X = np.array([[1.0, 2.0], [3.0, -4.0]], dtype=np.float32)
LISTEN = ServerOptions(grpc_port=0)
ENGINE = EngineOptions(
    variants=("full",),
    engines=("torch", "onnxruntime"),
    threads=1,
    factories={"double": "tests.cloud.test_worker:factory"},
)


def factory() -> torch.nn.Module:
    return torch.nn.Linear(2, 2, bias=False)


def bundle(folder: Path, files: dict[str, tuple[str, ...]]) -> str:
    """A bundle of y = 2 x, as a torch checkpoint or as an ONNX graph."""
    spec = TensorSpec(name="x", datatype="FP32", shape=(-1, 2))
    config = ModelConfig(
        name="double",
        task="tensor",
        inputs=(spec,),
        outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 2)),),
        max_batch=4,
    )
    (folder / "full").mkdir(parents=True)
    save_file({"weight": 2 * torch.eye(2)}, folder / "full/model.safetensors")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "double",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(folder / "full/model.onnx"))
    write_tensors(folder / "golden.safetensors", {"input.x": X, "output.y": X * 2})
    golden = GoldenSpec(file="golden.safetensors", metric="cosine", max_loss={"full": 0.001})
    write_spec(BundleSpec(model=config, variants=(Variant(name="full", files=files),), golden=golden), folder)
    return str(folder)


TORCH = ("full/model.safetensors",)
ONNX = ("full/model.onnx",)


@asynccontextmanager
async def running(folder: str, name: str = "w1") -> AsyncIterator[Worker]:
    config = WorkerConfig(name=name, server=LISTEN, engine=ENGINE, models=(StaticModel(bundle=folder),), drain_s=1.0)
    async with Worker(config) as worker:
        yield worker


@pytest.mark.parametrize(
    ("files", "platform"),
    [
        ({"torch": TORCH}, "torch"),
        ({"onnxruntime": ONNX}, "onnxruntime"),
    ],
)
async def test_worker_serves_a_bundle_with_the_engine_it_has(
    tmp_path: Path, files: dict[str, tuple[str, ...]], platform: str
) -> None:
    folder = bundle(tmp_path / "b", files)
    async with running(folder) as worker, OipClient(str(worker.endpoint()["grpc"])) as client:
        answer = await client.infer(Request(model="double", inputs={"x": X}, context=Context(reason=Reason.OVERLOAD)))
        np.testing.assert_allclose(answer.outputs["y"], X * 2)
        stamp = answer.stamp
        assert (stamp.target, stamp.version, stamp.by, stamp.reason) == ("cloud", "1", "w1", Reason.OVERLOAD)
        assert platform in (await client.model_metadata("double")).platform
        with pytest.raises(InvalidRequest, match="at most 4"):
            await client.infer(Request(model="double", inputs={"x": np.ones((5, 2), dtype=np.float32)}))


async def test_gateway_over_real_workers_balances(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "b", {"onnxruntime": ONNX})
    async with running(folder, "w1") as one, running(folder, "w2") as two:
        workers = tuple(str(worker.endpoint()["grpc"]) for worker in (one, two))
        config = GatewayConfig(workers=workers, server=LISTEN, drain_s=1.0)
        async with Gateway(config) as gateway, OipClient(str(gateway.endpoint()["grpc"])) as client:
            answers = [await client.infer(Request(model="double", inputs={"x": X})) for _ in range(30)]
            assert {answer.stamp.by for answer in answers} == {"w1", "w2"}
            await client.unload("double")
            assert not await client.model_ready("double")
            await client.load("double")
            assert (await client.infer(Request(model="double", inputs={"x": X}))).stamp.version == "1"


async def test_a_bundle_without_a_full_variant_is_not_for_workers(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "b", {"tensorrt": ONNX})
    with pytest.raises(IncompatibleRelease):
        async with running(folder):
            pass


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"drain_s": 1000}, "drain_s"),
        ({"max_queue_rows": 0}, "max_queue_rows"),
        ({"engine": {"threads": -1}}, "threads"),
        ({"sync": {"source": "a:1", "root": "r.json"}}, "state_dir"),
        ({"engine": {"factory": {}}}, "did you mean 'factories'"),
        ({"server": {"grpc_port": 70000}}, "grpc_port"),
    ],
)
def test_bad_configuration_is_refused(data: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(data, WorkerConfig, "worker.toml")
