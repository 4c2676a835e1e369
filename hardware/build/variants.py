"""The INT8 forms that a bundle carries, in the order in which nodes prefer them, and what each must look like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import BuildError
from hardware.build.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a variant is quantized. Weights are always int8, symmetric, one scale per output channel."""

    name: str
    engine: str
    is_activation_signed: bool
    reduce_range: bool
    is_simulated: bool  # scored in float, where the engine itself cannot run at build time
    is_fenced: bool  # ONNX Runtime runs it, whose optimizer would round what was left in float (see `quantize.py`)
    options: dict[str, Any] = field(default_factory=dict)
    check: Callable[[Graph], None] = lambda graph: None  # raises `BuildError` for what the engine would not take

    @property
    def largest_weight(self) -> int:
        """The largest integer that a weight becomes, by its absolute value."""
        return 64 if self.reduce_range else 127

    @property
    def file(self) -> str:
        return f"{self.name}/model.onnx"


def check_trt(graph: Graph) -> None:
    """Raises `BuildError` unless TensorRT's parser would take it: zero points 0, int8 weights, float bias."""
    constants = graph.initializers()
    producers = {out: node for node in graph.nodes() for out in node.outputs}
    for node in graph.nodes():
        if node.op in ("QuantizeLinear", "DequantizeLinear") and len(node.inputs) > 2:
            zero = constants[node.inputs[2]]
            if zero.dtype != np.int8 or zero.any():
                raise BuildError(f"trt-int8: node {node.name!r} has a zero point other than int8 0")
        if node.op in ("Conv", "ConvTranspose", "Gemm") and len(node.inputs) > 2 and node.inputs[2] not in constants:
            raise BuildError(f"trt-int8: layer {node.name!r} has a quantized bias")
        if node.op == "QuantizeLinear" and node.inputs[0] in constants:
            raise BuildError(f"trt-int8: {node.inputs[0]!r} is stored as float and quantized at load")
        if node.op in ("Conv", "ConvTranspose", "Gemm") and (dequantize := producers.get(node.inputs[1])) is not None:
            stored = constants.get(dequantize.inputs[0])
            if stored is None or stored.dtype != np.int8:
                raise BuildError(f"trt-int8: layer {node.name!r} has weights that are not int8")


# TensorRT's parser takes symmetric scales only and no quantized bias; int8 weights make the file a quarter of the size.
TRT_INT8 = Recipe(
    name="trt-int8",
    engine="tensorrt",
    is_activation_signed=True,
    reduce_range=False,
    is_simulated=True,
    is_fenced=False,
    options={
        "ActivationSymmetric": True,
        "WeightSymmetric": True,
        "QuantizeBias": False,
        "AddQDQPairToWeight": False,
        "DedicatedQDQPair": False,
        "QDQDisableWeightAdjustForInt32Bias": True,
        "QDQOpTypePerChannelSupportToAxis": {"Conv": 0, "ConvTranspose": 1, "MatMul": 1},
    },
    check=check_trt,
)

# Weights keep to 7 bits: x86 CPUs without VNNI add pairs of u8 x s8 products in 16 bits, which 8-bit weights overflow.
CPU_INT8 = Recipe(
    name="cpu-int8",
    engine="onnxruntime",
    is_activation_signed=False,
    reduce_range=True,
    is_simulated=False,
    is_fenced=True,
)

RECIPES = (TRT_INT8, CPU_INT8)
FULL = "full"
