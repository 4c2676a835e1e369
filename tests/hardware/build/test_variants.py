"""What TensorRT's parser would refuse is refused at build time."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from common.errors import BuildError
from common.tensors import Array
from hardware.build.graph import Graph
from hardware.build.variants import check_trt

INT8_ZERO = np.int8(0)


def linear(*, zero: Array, bias_is_quantized: bool = False, weight: Array | None = None) -> Graph:
    """x -> Q/DQ -> Gemm with weights behind a DequantizeLinear."""
    weight = np.ones((2, 3), np.int8) if weight is None else weight
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"], name="q"),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"], name="dq"),
        helper.make_node("DequantizeLinear", ["w", "s", "wz"], ["wd"], name="dqw"),
        helper.make_node("Gemm", ["xd", "wd", "bd" if bias_is_quantized else "b"], ["y"], name="gemm"),
    ]
    if bias_is_quantized:
        nodes.insert(3, helper.make_node("DequantizeLinear", ["bq", "s"], ["bd"], name="dqb"))
    constants = {
        "s": np.float32(0.1),
        "z": zero,
        "w": weight,
        "wz": weight.dtype.type(0),
        "b": np.zeros(3, np.float32),
        "bq": np.zeros(3, np.int32),
    }
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    return Graph(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def test_a_symmetric_graph_with_int8_weights_and_float_bias_passes() -> None:
    check_trt(linear(zero=INT8_ZERO))


@pytest.mark.parametrize(
    ("graph", "problem"),
    [
        (linear(zero=np.int8(3)), "zero point"),
        (linear(zero=np.uint8(0)), "zero point"),
        (linear(zero=INT8_ZERO, bias_is_quantized=True), "quantized bias"),
        (linear(zero=INT8_ZERO, weight=np.ones((2, 3), np.uint8)), "zero point"),
    ],
)
def test_what_tensorrt_would_refuse_is_refused(graph: Graph, problem: str) -> None:
    with pytest.raises(BuildError, match=problem):
        check_trt(graph)


def test_weights_stored_as_float_are_refused() -> None:
    graph = linear(zero=INT8_ZERO)
    graph.set_initializer("w", np.ones((2, 3), np.float32))
    with pytest.raises(BuildError, match="not int8"):
        check_trt(graph)
