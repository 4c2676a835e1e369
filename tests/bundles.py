"""Small bundles made by hand, for tests that need a real engine but no training: y = x @ W + b, three classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from common.bundle import BundleSpec, CacheRules, GoldenSpec, ModelConfig, Variant, write_spec
from common.tensorfile import write_tensors
from common.tensors import Array, TensorSpec

WEIGHT = np.array([[1.0, 0.0, -1.0], [0.0, 1.0, 1.0]], np.float32)
BIAS = np.array([0.0, 0.5, 0.0], np.float32)
LABELS = ("left", "right", "middle")


def forward(x: Array, weight: Array = WEIGHT) -> Array:
    return np.asarray(x @ weight + BIAS)


def write_linear_onnx(path: Path, weight: Array = WEIGHT) -> None:
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["logits"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(BIAS, "b")],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def write_bundle(
    folder: Path,
    *,
    name: str = "linear",
    weight: Array = WEIGHT,
    int8_weight: Array | None = None,
    max_batch: int = 8,
    cache: CacheRules | None = None,
) -> Path:
    """A bundle whose golden set comes from `weight`; the edge's variant may be given another (wrong) weight."""
    x = np.random.default_rng(5).standard_normal((16, 2)).astype(np.float32)
    write_linear_onnx(folder / "full/model.onnx", weight)
    write_linear_onnx(folder / "cpu-int8/model.onnx", weight if int8_weight is None else int8_weight)
    write_tensors(folder / "golden.safetensors", {"input.x": x, "output.logits": forward(x, weight)})
    (folder / "labels.txt").write_text("\n".join(LABELS) + "\n", encoding="utf-8")
    spec = BundleSpec(
        model=ModelConfig(
            name=name,
            task="classification",
            inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 2)),),
            outputs=(TensorSpec(name="logits", datatype="FP32", shape=(-1, 3)),),
            max_batch=max_batch,
            labels="labels.txt",
            cache=cache or CacheRules(),
        ),
        variants=(
            Variant(name="cpu-int8", files={"onnxruntime": ("cpu-int8/model.onnx",)}),
            Variant(name="full", files={"onnxruntime": ("full/model.onnx",)}),
        ),
        golden=GoldenSpec(
            file="golden.safetensors", metric="expected_accuracy", max_loss={"cpu-int8": 0.05, "full": 0.05}
        ),
    )
    write_spec(spec, folder)
    return folder
