"""BF16 from the caller's bytes to torch and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.bundle import ModelConfig
from common.errors import EngineError, InvalidInput
from common.serving.engine import Batch
from common.tensorfile import write_tensors
from common.tensors import TensorSpec, narrowed, widened
from hardware import engines
from hardware.engines.base import EngineRequest
from tests.hostile import write_same_bundle


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.bfloat16
        return x * 2


def test_torch_gets_and_gives_bf16(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {})
    x, y = (TensorSpec(name=name, datatype="BF16", shape=(-1, 3)) for name in "xy")
    config = ModelConfig(name="twice", task="tensor", inputs=(x,), outputs=(y,))
    files = (tmp_path / "model.safetensors",)
    request = EngineRequest(config=config, variant="full", files=files, factories={"twice": f"{__name__}:Twice"})
    engine = engines.open_engine("torch", request)
    engine.warm()
    given = narrowed(np.array([[1.5, float("inf"), -0.0]], np.float32))
    [one, two] = engine.run(Batch(({"x": given}, {"x": given}), 2))
    assert not isinstance(one, Exception)
    assert not isinstance(two, Exception)
    np.testing.assert_array_equal(widened(one["y"]), np.array([[3.0, np.inf, -0.0]], np.float32))
    assert one["y"].tobytes() == two["y"].tobytes()


def test_text_that_is_none_is_its_senders_fault_and_its_neighbours_are_answered(tmp_path: Path) -> None:
    folder = write_same_bundle(tmp_path / "same", "BYTES")
    x, y = (TensorSpec(name=name, datatype="BYTES", shape=(-1, 2)) for name in "xy")
    config = ModelConfig(name="same-bytes", task="tensor", inputs=(x,), outputs=(y,))
    request = EngineRequest(config=config, variant="cpu-int8", files=(folder / "model.onnx",))
    engine = engines.open_engine("onnxruntime", request)
    engine.warm()
    good = {"x": np.array([["é", b"b"]], object)}
    bad = {"x": np.array([[b"\xff", b"b"]], object)}
    first, second, third = engine.run(Batch((good, bad, good), 3))
    assert isinstance(second, InvalidInput)
    assert not isinstance(second, EngineError)
    for answer in (first, third):
        assert not isinstance(answer, Exception)
        assert answer["y"].tolist() == [["é", "b"]]
    assert isinstance(engine.run(Batch((bad,), 1))[0], InvalidInput)


def test_onnx_runtime_says_that_it_takes_no_bf16(tmp_path: Path) -> None:
    folder = write_same_bundle(tmp_path / "same", "FP32")
    x, y = (TensorSpec(name=name, datatype="BF16", shape=(-1, 2)) for name in "xy")
    config = ModelConfig(name="same-fp32", task="tensor", inputs=(x,), outputs=(y,))
    request = EngineRequest(config=config, variant="cpu-int8", files=(folder / "model.onnx",))
    engine = engines.open_engine("onnxruntime", request)
    with pytest.raises(Exception, match="x"):
        engine.warm()
