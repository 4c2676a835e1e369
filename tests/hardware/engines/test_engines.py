"""One behaviour over all back-ends: a small linear model as ONNX and as torch parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file

from common.bundle import ModelConfig
from common.errors import ConfigError, EngineError, EngineUnavailable
from common.serving.engine import Batch, Engine
from common.tensors import TensorSpec
from hardware import engines
from hardware.engines.base import EngineRequest

WEIGHT = np.array([[1.0, 2.0, 3.0], [0.5, -1.0, 0.0]], np.float32)  # y = W x + b, by hand below
BIAS = np.array([10.0, 20.0], np.float32)
CONFIG = ModelConfig(
    name="linear",
    task="tensor",
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 3)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 2)),),
    max_batch=4,
)


def linear() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


FACTORIES = {"linear": f"{__name__}:linear"}


def write_onnx(path: Path) -> Path:
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)
    graph = helper.make_graph(
        [node],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(BIAS, "b")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def write_torch(path: Path) -> Path:
    save_file({"weight": torch.from_numpy(WEIGHT), "bias": torch.from_numpy(BIAS)}, path)
    return path


def ask(name: str, folder: Path, config: ModelConfig = CONFIG) -> EngineRequest:
    writer = {"onnxruntime": write_onnx, "torch": write_torch}[name]
    suffix = {"onnxruntime": "onnx", "torch": "safetensors"}[name]
    return EngineRequest(
        config=config, variant="full", files=(writer(folder / f"model.{suffix}"),), factories=FACTORIES
    )


@pytest.fixture(params=["onnxruntime", "torch"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    return engines.open_engine(request.param, ask(request.param, tmp_path))


def test_values_are_right(engine: Engine) -> None:
    [answer] = engine.run(Batch(({"x": np.array([[1, 1, 1], [2, 0, -1]], np.float32)},), 2))
    assert not isinstance(answer, Exception)
    np.testing.assert_allclose(answer["y"], [[16.0, 19.5], [9.0, 21.0]])


def test_a_batch_of_several_requests_equals_each_alone(engine: Engine) -> None:
    rng = np.random.default_rng(3)
    items = tuple({"x": rng.standard_normal((rows, 3)).astype(np.float32)} for rows in (1, 2, 1))
    together = engine.run(Batch(items, 4))
    for item, answer in zip(items, together, strict=True):
        [alone] = engine.run(Batch((item,), len(item["x"])))
        assert not isinstance(answer, Exception)
        assert not isinstance(alone, Exception)
        np.testing.assert_allclose(answer["y"], alone["y"], rtol=1e-6)


def test_warming_measures_a_latency(engine: Engine) -> None:
    assert 0 < engine.warm().seconds(1, 0.0) < 1


def test_a_closed_engine_refuses(engine: Engine) -> None:
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.run(Batch(({"x": np.zeros((1, 3), np.float32)},), 1))


def test_the_fingerprint_names_engine_and_variant(engine: Engine) -> None:
    assert engine.fingerprint.platform in ("onnxruntime_full", "torch_full")


@pytest.mark.parametrize("name", ["onnxruntime", "torch"])
def test_a_damaged_file_is_an_engine_error(name: str, tmp_path: Path) -> None:
    asked = ask(name, tmp_path)
    asked.files[0].write_bytes(asked.files[0].read_bytes()[:50])
    with pytest.raises(EngineError, match="linear"):
        engines.open_engine(name, asked)


def test_an_unknown_engine_names_the_known_ones() -> None:
    with pytest.raises(EngineUnavailable, match="onnxruntime, torch"):
        engines.open_engine("abacus", EngineRequest(config=CONFIG, variant="full", files=()))
    assert not engines.is_available("abacus")


def test_an_onnx_graph_that_is_not_what_the_config_declares_is_refused(tmp_path: Path) -> None:
    other = ModelConfig(
        name="linear",
        task="tensor",
        inputs=(TensorSpec(name="pixels", datatype="FP32", shape=(-1, 3)),),
        outputs=CONFIG.outputs,
    )
    with pytest.raises(EngineError, match="pixels"):
        engines.open_engine("onnxruntime", ask("onnxruntime", tmp_path, other))


def test_torch_needs_a_factory_from_this_process_and_parameters_that_fit(tmp_path: Path) -> None:
    asked = ask("torch", tmp_path)
    without = EngineRequest(config=CONFIG, variant="full", files=asked.files)
    with pytest.raises(ConfigError, match=r"factories\.linear"):
        engines.open_engine("torch", without)
    missing = EngineRequest(config=CONFIG, variant="full", files=asked.files, factories={"linear": "no.such:thing"})
    with pytest.raises(ConfigError, match="cannot be imported"):
        engines.open_engine("torch", missing)
    save_file({"weight": torch.zeros(2, 3)}, asked.files[0])
    with pytest.raises(EngineError, match="does not fit"):
        engines.open_engine("torch", asked)
