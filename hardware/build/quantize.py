"""Static quantization: an FP32 graph, its statistics and a recipe to a Q/DQ graph. The only importer of the quantizer.

Rounding weights to 7 or 8 bits shifts the mean of each output channel, and in a deep network of depthwise layers these
shifts add up to most of the loss. The shift is known beforehand, ``sum(dequantized - w) * E[input]`` per channel, so
the bias takes it back (bias correction: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias
Correction", 2019, here with measured means). It depends on a layer's own weights and input alone: training the last
layer further leaves every other quantized tensor as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from onnxruntime.quantization import CalibrationMethod, QuantType
from onnxruntime.quantization.calibrate import TensorsData
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

from common.tensors import Array
from hardware.build.calibrate import Statistics
from hardware.build.graph import Graph, canonical
from hardware.build.layers import Layer
from hardware.build.scales import Scale
from hardware.build.variants import Recipe

# Everything between two layers that has an integer kernel; one float operator inside would cost a round trip.
_OPERATORS = (
    "Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Mul", "Relu", "Clip", "LeakyRelu", "Sigmoid", "MaxPool",
    "AveragePool", "GlobalAveragePool", "Concat", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Pad",
)  # fmt: skip


class Quantizer:
    """One recipe for one graph. Statistics and bias corrections are computed once, then any set may stay in float.

    The tensors in `scales` are quantized with these, whatever their values are, and clipped; all others with new ones.
    """

    def __init__(
        self,
        graph: Graph,
        layers: Sequence[Layer],
        statistics: Statistics,
        recipe: Recipe,
        scales: Mapping[str, Scale] | None = None,
    ) -> None:
        self._layers, self._recipe = layers, recipe
        self._scales = scales or {}
        self._ranges = TensorsData(
            CalibrationMethod.MinMax,
            {name: (np.float32(low), np.float32(high)) for name, (low, high) in statistics.ranges.items()},
        )
        self._graph = graph
        self._shifts: dict[str, Array] = {}  # none yet: the rounded weights show what they will be
        self._shifts = _mean_shifts(self._graph, self.quantize(()), layers, statistics)

    def quantize(self, float_layers: Collection[str]) -> Graph:
        """The Q/DQ graph; the named layers, with the activation that follows them, keep float arithmetic."""
        shifts = {name: shift for name, shift in self._shifts.items() if name not in float_layers}
        left_out = [layer for layer in self._layers if layer.name in float_layers]
        quantizer = QDQQuantizer(
            _corrected(self._graph, self._layers, shifts).proto,
            True,  # one scale per output channel
            self._recipe.reduce_range,
            QuantType.QInt8,
            QuantType.QInt8 if self._recipe.is_activation_signed else QuantType.QUInt8,
            self._ranges,
            [],
            [name for layer in left_out for name in (layer.name, layer.activation) if name],
            list(_OPERATORS),
            {**self._recipe.options, "TensorQuantOverrides": _overrides(self._scales)},
        )
        quantizer.quantize_model()
        quantized = Graph(quantizer.model.model)
        _clip(quantized, self._scales, self._recipe.largest_weight)
        if self._recipe.is_fenced:
            _fence(quantized, {layer.name for layer in left_out})
        return canonical(quantized)


def _overrides(scales: Mapping[str, Scale]) -> dict[str, list[dict[str, Any]]]:
    """As the quantizer wants them: a list with one entry per channel."""
    return {
        name: [
            {"scale": np.asarray(step), "zero_point": np.asarray(scale.zero)}
            | ({} if scale.axis is None else {"axis": scale.axis})
            for step in scale.steps
        ]
        for name, scale in scales.items()
    }


def _clip(quantized: Graph, scales: Mapping[str, Scale], largest: int) -> None:
    """Weights beyond a given scale's range: the quantizer clips them to all of int8, whatever the recipe says."""
    constants = quantized.initializers()
    for name, scale in scales.items():
        integers = constants.get(f"{name}_quantized")
        if scale.integers is not None and integers is not None:
            quantized.set_initializer(f"{name}_quantized", np.clip(integers, -largest, largest))


def _mean_shifts(graph: Graph, quantized: Graph, layers: Sequence[Layer], statistics: Statistics) -> dict[str, Array]:
    """By layer: how far rounding its weights moves the mean of each output channel, float64 [channels out]."""
    weights = graph.initializers()
    rounded = _dequantized_weights(quantized)
    attributes = {node.name: node.attributes for node in graph.nodes()}
    shifts = {}
    for layer in layers:
        mean = statistics.means.get(layer.name)
        if mean is None or layer.name not in rounded or mean.ndim != 1:
            continue
        error = rounded[layer.name] - weights[layer.weight].astype(np.float64)
        if layer.op == "Gemm":
            if _is_plain(attributes[layer.name]):
                shifts[layer.name] = (error if attributes[layer.name].get("transB") else error.T) @ mean
            continue
        groups = attributes[layer.name].get("group", 1)
        per_group = error.sum(axis=tuple(range(2, error.ndim))).reshape(groups, -1, error.shape[1])
        shifts[layer.name] = np.einsum("goi,gi->go", per_group, mean.reshape(groups, -1)).ravel()
    return shifts


def _is_plain(attributes: Mapping[str, object]) -> bool:
    return not attributes.get("transA") and attributes.get("alpha", 1.0) == 1.0 and attributes.get("beta", 1.0) == 1.0


def _dequantized_weights(quantized: Graph) -> dict[str, Array]:
    """By layer name: the weights as the integer kernels see them, float64."""
    constants = quantized.initializers()
    producers = {output: node for node in quantized.nodes() for output in node.outputs}
    found = {}
    for node in quantized.nodes():
        source = producers.get(node.inputs[1]) if len(node.inputs) > 1 else None
        if source is None or source.op != "DequantizeLinear" or source.inputs[0] not in constants:
            continue
        stored, scale = constants[source.inputs[0]].astype(np.float64), constants[source.inputs[1]].astype(np.float64)
        if scale.ndim == 1:
            shape = [1] * stored.ndim
            shape[source.attributes.get("axis", 1)] = -1
            scale = scale.reshape(shape)
        found[node.name] = stored * scale  # symmetric: the zero point is 0
    return found


def _corrected(graph: Graph, layers: Sequence[Layer], shifts: Mapping[str, Array]) -> Graph:
    """A copy whose biases take the shifts back; layers without a bias get one."""
    corrected = graph.copy()
    constants = graph.initializers()
    nodes = {node.name: node for node in graph.nodes()}
    for layer in layers:
        if layer.name not in shifts:
            continue
        inputs = nodes[layer.name].inputs
        bias = constants.get(inputs[2], None) if len(inputs) > 2 and inputs[2] else np.zeros(len(shifts[layer.name]))
        if bias is None or bias.shape != shifts[layer.name].shape:
            continue  # a computed or broadcast bias: left as it is
        own = f"{layer.name}:bias"  # never the shared constant that another layer may read
        corrected.set_initializer(own, (bias - shifts[layer.name]).astype(np.float32))
        corrected.set_input(layer.name, 2, own)
    return corrected


def _fence(quantized: Graph, float_layers: Collection[str]) -> None:
    """Puts a Clip that clips nothing between a DequantizeLinear and a float layer that reads it.

    ONNX Runtime would otherwise take a float layer between DequantizeLinear and QuantizeLinear for a quantized one with
    its weights forgotten, and round them itself, coarsely: one scale for all channels.
    """
    constants = quantized.initializers()
    producers = {output: node for node in quantized.nodes() for output in node.outputs}
    for node in list(quantized.nodes()):
        source = producers.get(node.inputs[0]) if node.name in float_layers else None
        if source is None or source.op != "DequantizeLinear":
            continue
        scale, zero = constants[source.inputs[1]], constants[source.inputs[2]]
        limits = np.iinfo(zero.dtype)
        low, high, fenced = f"{node.name}:low", f"{node.name}:high", f"{node.name}:fenced"
        quantized.set_initializer(low, ((limits.min - zero.astype(np.int32)) * scale).astype(np.float32))
        quantized.set_initializer(high, ((limits.max - zero.astype(np.int32)) * scale).astype(np.float32))
        quantized.insert_before(node.name, "Clip", [node.inputs[0], low, high], fenced)
        quantized.set_input(node.name, 0, fenced)
