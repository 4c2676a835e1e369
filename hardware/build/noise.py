"""What quantization does to each layer on its own: signal to noise, measured for all layers in one pass.

The Q/DQ graph runs beside the FP32 graph, and every quantizer in it reads FP32's tensor instead of what the quantized
layers before it made. So a layer sees the right input, rounded: the error at its output is its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from common.tensors import Array
from hardware.build.data import Rows
from hardware.build.graph import Graph, Node
from hardware.build.layers import Layer
from hardware.build.session import Session

_FP32 = "fp32/"
_ROUNDED = ":rounded"
_RENAMED = "_QuantizeLinear_Input"  # the quantizer's new name for a graph output before its Q/DQ pair


def layer_noise(
    graph: Graph, quantized: Graph, layers: Sequence[Layer], rows: Rows, *, batch: int = 8
) -> dict[str, float]:
    """By layer: noise power over signal power, the mean over output channels, each counted as at most 1.

    Per channel, since one loud channel would hide that all the quiet ones are lost.
    """
    joined, pairs = _beside(graph, quantized, layers)
    session = Session(joined.serialize())
    noise: dict[str, Array] = {}
    signal: dict[str, Array] = {}
    for feeds in rows.feeds(batch):
        seen = session.run(feeds)
        for layer in layers:
            if layer.name not in pairs:
                continue
            wanted, given = (seen[tensor].astype(np.float64) for tensor in pairs[layer.name])
            axes = tuple(axis for axis in range(wanted.ndim) if axis != _channel_axis(layer, wanted))
            noise[layer.name] = noise.get(layer.name, 0.0) + ((given - wanted) ** 2).sum(axis=axes)
            signal[layer.name] = signal.get(layer.name, 0.0) + (wanted**2).sum(axis=axes)
    return {name: _ratio(noise[name], signal[name]) for name in noise}


def decibels(ratio: float) -> float:
    """Signal to quantization noise (SQNR) of a noise ratio; 100 dB stands for no noise at all."""
    return min(100.0, -10 * math.log10(max(ratio, 1e-12)))


def _ratio(noise: Array, signal: Array) -> float:
    alive = signal > 0
    if not alive.any():
        return 0.0
    return float(np.minimum(1.0, noise[alive] / signal[alive]).mean())


def _channel_axis(layer: Layer, tensor: Array) -> int:
    return 1 if layer.op in ("Conv", "ConvTranspose") else tensor.ndim - 1


def _beside(graph: Graph, quantized: Graph, layers: Sequence[Layer]) -> tuple[Graph, dict[str, tuple[str, str]]]:
    """Both graphs as one, and by layer the pair (FP32's tensor, the quantized layer's own), after the activation."""
    reference, joined = graph.prefixed(_FP32), quantized.copy()
    known = {output for node in graph.nodes() for output in node.outputs}
    inside = {layer.output for layer in layers if layer.activation}  # between a layer and its own activation
    quantizers = {node.inputs[0]: node for node in quantized.nodes() if node.op == "QuantizeLinear"}
    for tensor, node in quantizers.items():
        if _original(tensor) in known - inside:
            joined.set_input(node.name, 0, _FP32 + _original(tensor))
    made = {_original(output): output for node in quantized.nodes() for output in node.outputs}
    pairs = {}
    for layer in layers:
        if (own := made.get(layer.result)) is not None:
            if own in quantizers:
                own = _rounded_too(joined, own, quantizers[own])
            pairs[layer.name] = (_FP32 + layer.result, own)
    joined.absorb(reference)
    for pair in pairs.values():
        for tensor in pair:
            joined.add_output(tensor)
    return joined, pairs


def _original(tensor: str) -> str:
    return tensor.removesuffix(_RENAMED)


def _rounded_too(joined: Graph, tensor: str, quantize: Node) -> str:
    """The layer's own result through a copy of the Q/DQ pair that follows it (which may also be its Relu or Clip)."""
    scales = quantize.inputs[1:]
    joined.add_node("QuantizeLinear", [tensor, *scales], f"{tensor}{_ROUNDED}:q")
    joined.add_node("DequantizeLinear", [f"{tensor}{_ROUNDED}:q", *scales], f"{tensor}{_ROUNDED}")
    return f"{tensor}{_ROUNDED}"
