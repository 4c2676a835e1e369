"""The Q/DQ graphs, judged by ONNX Runtime itself: what it fuses, what it computes, what stays in float."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from hardware.build.calibrate import Statistics, calibrate
from hardware.build.graph import Graph
from hardware.build.noise import decibels, layer_noise
from hardware.build.quantize import Quantizer
from hardware.build.sensitivity import output_errors
from hardware.build.session import Session
from hardware.build.variants import CPU_INT8, TRT_INT8, check_trt
from tests.hardware.build.conftest import Fp32


@pytest.fixture(scope="module")
def statistics(fp32: Fp32) -> Statistics:
    return calibrate(fp32.graph, fp32.layers, fp32.calibration)


@pytest.fixture(scope="module")
def cpu(fp32: Fp32, statistics: Statistics) -> Quantizer:
    return Quantizer(fp32.graph, fp32.layers, statistics, CPU_INT8)


@pytest.fixture(scope="module")
def trt(fp32: Fp32, statistics: Statistics) -> Quantizer:
    return Quantizer(fp32.graph, fp32.layers, statistics, TRT_INT8)


def as_executed(model: Graph, folder: Path) -> Counter[str]:
    """Operators that ONNX Runtime runs once it has optimized the model."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(model.serialize(), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


def weights(model: Graph) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return {name: array for name, array in model.initializers().items() if name.endswith(".weight_quantized")}


def test_onnx_runtime_runs_every_layer_in_integers(cpu: Quantizer, tmp_path: Path) -> None:
    executed = as_executed(cpu.quantize(()), tmp_path)
    assert (executed["QLinearConv"], executed["QGemm"]) == (2, 2)
    assert (executed["Conv"], executed["Gemm"], executed["Relu"], executed["MaxPool"]) == (0, 0, 0, 0)
    assert executed["NhwcMaxPool"] == 1  # the integer one
    assert (executed["QuantizeLinear"], executed["DequantizeLinear"]) == (1, 1)  # the way in and the way out


def test_cpu_weights_keep_to_seven_bits(cpu: Quantizer) -> None:
    # 2 x 255 x 64 = 32,640 fits 16 bits; with 127 the sum of two products would not.
    stored = weights(cpu.quantize(()))
    assert len(stored) == 4
    assert max(int(np.abs(array.astype(int)).max()) for array in stored.values()) == 64


def test_trt_weights_use_eight_bits_and_every_zero_point_is_zero(trt: Quantizer) -> None:
    model = trt.quantize(())
    check_trt(model)
    assert max(int(np.abs(array.astype(int)).max()) for array in weights(model).values()) == 127
    zeros = [array for name, array in model.initializers().items() if name.endswith("_zero_point")]
    assert zeros
    assert not any(array.any() for array in zeros)
    assert {str(array.dtype) for array in zeros} == {"int8"}


def test_the_mean_of_each_channel_survives_the_rounding_of_weights(fp32: Fp32, cpu: Quantizer) -> None:
    plain = Quantizer(fp32.graph, fp32.layers, _without_means(fp32), CPU_INT8)
    conv2 = fp32.layers[1]

    def drift(model: Graph) -> float:
        probed, reference = model.copy(), fp32.graph.copy()
        probed.add_output(conv2.result)
        reference.add_output(conv2.result)
        seen, wanted = (
            Session(graph.serialize(), optimized=False).run_rows(fp32.calibration)[conv2.result]
            for graph in (probed, reference)
        )
        return float(np.abs((np.maximum(seen, 0) - wanted).mean(axis=(0, 2, 3))).sum())

    assert drift(cpu.quantize(())) < 0.7 * drift(plain.quantize(()))


def test_a_layer_left_alone_in_float_stays_in_float_in_onnx_runtime(cpu: Quantizer, fp32: Fp32, tmp_path: Path) -> None:
    model = cpu.quantize(["/hidden/Gemm"])  # between two quantized layers: the optimizer would round it
    executed = as_executed(model, tmp_path)
    assert (executed["QLinearConv"], executed["QGemm"], executed["Gemm"]) == (2, 1, 1)
    rows = fp32.heldout.take(np.arange(50))
    fast = Session(model.serialize()).run_rows(rows)["logits"]
    exact = Session(model.serialize(), optimized=False).run_rows(rows)["logits"]
    assert np.abs(fast - exact).max() < 0.02 * np.abs(exact).max()


def test_layers_left_in_float_keep_their_parameters_bit_for_bit(cpu: Quantizer, fp32: Fp32) -> None:
    kept = cpu.quantize(["/hidden/Gemm", "/last/Gemm"]).initializers()
    for name in ("hidden.weight", "hidden.bias", "last.weight", "last.bias"):
        np.testing.assert_array_equal(kept[name], fp32.graph.initializers()[name])


def test_quantizing_twice_gives_the_same_bytes(cpu: Quantizer) -> None:
    assert cpu.quantize(()).serialize() == cpu.quantize(()).serialize()


def test_noise_of_a_layer_is_its_own(fp32: Fp32, cpu: Quantizer) -> None:
    rows = fp32.calibration.take(np.arange(32))
    noise = layer_noise(fp32.graph, cpu.quantize(()), fp32.layers, rows)
    assert set(noise) == {layer.name for layer in fp32.layers}
    # uniform rounding of 8 bit activations and 7 bit weights: some 35 to 50 dB per layer, none of it inherited
    assert all(30 < decibels(ratio) < 55 for ratio in noise.values())


def test_one_loud_channel_does_not_hide_that_the_others_are_lost(fp32: Fp32, statistics: Statistics) -> None:
    conv1 = fp32.layers[0]
    loud = Statistics(ranges={**statistics.ranges, conv1.result: (0.0, 1e5)}, means=statistics.means)
    model = Quantizer(fp32.graph, fp32.layers, loud, CPU_INT8).quantize(())
    noise = layer_noise(fp32.graph, model, fp32.layers, fp32.calibration.take(np.arange(32)))
    assert noise["/conv1/Conv"] == pytest.approx(1.0, abs=0.01)
    assert noise["/last/Gemm"] < 0.001


def test_the_layer_to_blame_has_the_largest_error_at_the_output(fp32: Fp32, statistics: Statistics) -> None:
    hidden = fp32.layers[2]
    loud = Statistics(ranges={**statistics.ranges, hidden.result: (0.0, 1e5)}, means=statistics.means)
    quantizer = Quantizer(fp32.graph, fp32.layers, loud, CPU_INT8)
    rows = fp32.calibration.take(np.arange(16))
    errors = output_errors(fp32.graph, quantizer, fp32.layers, rows, "logits", is_simulated=False)
    assert sorted(errors, key=errors.__getitem__)[2:] in (
        ["/last/Gemm", "/hidden/Gemm"],
        ["/hidden/Gemm", "/last/Gemm"],
    )
    assert errors["/conv1/Conv"] < 0.01 < 0.5 < errors["/last/Gemm"]


def test_no_noise_is_a_hundred_decibels() -> None:
    assert (decibels(0.0), decibels(0.01)) == (100.0, pytest.approx(20.0))


def _without_means(fp32: Fp32) -> Statistics:
    return Statistics(ranges=calibrate(fp32.graph, fp32.layers, fp32.calibration).ranges, means={})
