"""Layers, their MACs, ranges and means: against torch and arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from common.errors import BuildError
from common.tensors import Array
from hardware.build.calibrate import calibrate
from hardware.build.data import Rows
from hardware.build.export import load_module
from hardware.build.graph import Graph
from hardware.build.layers import find_layers, mac_share
from tests.hardware.build.conftest import Fp32, Prepared


def rows_of(array: Array) -> Rows:
    return Rows(inputs={"x": array}, labels=None, groups=None, image_input=None, image=None)


def test_macs_are_outputs_times_the_inputs_each_one_sums_over(fp32: Fp32) -> None:
    assert [(layer.name, layer.macs) for layer in fp32.layers] == [
        ("/conv1/Conv", 8 * 8 * 32 * 9),
        ("/conv2/Conv", 8 * 8 * 64 * 32 * 9),
        ("/hidden/Gemm", 64 * 4 * 4 * 256),
        ("/last/Gemm", 256 * 10),
    ]
    assert mac_share(fp32.layers, ["/conv2/Conv"]) == pytest.approx(1179648 / 1462784)


def test_a_layer_knows_the_activation_that_alone_follows_it(fp32: Fp32) -> None:
    assert [layer.activation for layer in fp32.layers] == ["/Relu", "/Relu_1", "/Relu_2", None]


def test_macs_of_a_grouped_convolution_and_of_a_matrix_product() -> None:
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "k"], ["c"], group=2, name="conv"),
            helper.make_node("MatMul", ["c", "m"], ["y"], name="matmul"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 5, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(np.ones((6, 2, 3, 3), np.float32), "k"),
            numpy_helper.from_array(np.ones((3, 7), np.float32), "m"),
        ],
    )
    model = Graph(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    conv, matmul = find_layers(model, rows_of(np.ones((1, 4, 5, 5), np.float32)))
    assert conv.macs == (6 * 3 * 3) * (2 * 3 * 3)
    assert matmul.macs == (6 * 3 * 7) * 3


def test_ranges_and_means_are_those_of_torch(fp32: Fp32, digits_v2: Prepared) -> None:
    statistics = calibrate(fp32.graph, fp32.layers, fp32.calibration, batch=100)  # 512 rows: the last batch is short
    module = load_module(digits_v2.spec.source, digits_v2.folder)
    with torch.inference_mode():
        pixels = torch.from_numpy(fp32.calibration.inputs["pixels"])
        hidden = torch.relu(module.conv1(pixels))  # type: ignore[operator]
        logits = module(pixels)
    conv2 = fp32.layers[1]
    assert statistics.ranges[conv2.input] == pytest.approx((0.0, hidden.max().item()), rel=1e-5)
    assert statistics.ranges["logits"] == pytest.approx((logits.min().item(), logits.max().item()), rel=1e-4)
    np.testing.assert_allclose(statistics.means[conv2.name], hidden.mean(dim=(0, 2, 3)).numpy(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("opset", [17, 18])  # in 18 the axes of a mean became an input
def test_ranges_contain_zero_in_every_operator_set(opset: int) -> None:
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "k"], ["y"], name="conv")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.full((1, 1, 1, 1), -2, np.float32), "k")],
    )
    model = Graph(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8))
    rows = rows_of(np.full((3, 1, 2, 2), 5, np.float32))
    statistics = calibrate(model, find_layers(model, rows), rows)
    assert statistics.ranges == {"x": (0.0, 5.0), "y": (-10.0, 0.0)}
    assert statistics.means["conv"].tolist() == [5.0]


def test_values_that_are_not_finite_are_refused(fp32: Fp32) -> None:
    bad = fp32.calibration.inputs["pixels"][:4].copy()
    bad[0, 0, 0, 0] = np.inf
    rows = Rows(inputs={"pixels": bad}, labels=None, groups=None, image_input=None, image=None)
    with pytest.raises(BuildError, match="not finite"):
        calibrate(fp32.graph, fp32.layers, rows)
