"""The layers that quantization is about (those with weights) and what each costs in multiply-accumulates (MACs)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.tensors import Array
from hardware.build.data import Rows
from hardware.build.graph import Graph, Node
from hardware.build.session import Session

_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_ACTIVATIONS = ("Relu", "Clip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A Conv, ConvTranspose, Gemm or MatMul with constant weights. `macs` are for one row."""

    name: str
    op: str
    input: str
    output: str
    weight: str
    macs: int
    rank: int  # dimensions of its input
    activation: str | None  # the Relu or Clip node that alone follows it
    result: str  # its output, after that activation

    @property
    def spatial_axes(self) -> list[int]:
        """Axes of the input that are neither batch nor channel."""
        return list(range(2, self.rank))


def find_layers(graph: Graph, rows: Rows) -> list[Layer]:
    """Layers in graph order; one row goes through the model to learn the shapes."""
    constants = graph.initializers()
    nodes = [n for n in graph.nodes() if n.op in _WEIGHTED and len(n.inputs) > 1 and n.inputs[1] in constants]
    probed = graph.copy()
    for node in nodes:
        probed.add_output(node.inputs[0])
        probed.add_output(node.outputs[0])
    feeds = next(rows.feeds(1))
    seen = {**Session(probed.serialize()).run(feeds), **feeds}
    followers = _followers(graph)
    return [
        Layer(
            name=node.name,
            op=node.op,
            input=node.inputs[0],
            output=node.outputs[0],
            weight=node.inputs[1],
            macs=_macs(node, constants[node.inputs[1]], seen[node.inputs[0]], seen[node.outputs[0]]),
            rank=seen[node.inputs[0]].ndim,
            activation=followers[node.outputs[0]].name if node.outputs[0] in followers else None,
            result=followers.get(node.outputs[0], node).outputs[0],
        )
        for node in nodes
    ]


def mac_share(layers: Sequence[Layer], names: Iterable[str]) -> float:
    """The part of all MACs that the named layers do."""
    chosen = set(names)
    return sum(layer.macs for layer in layers if layer.name in chosen) / max(1, sum(layer.macs for layer in layers))


def _macs(node: Node, weight: Array, given: Array, result: Array) -> int:
    if node.op == "Conv":
        return math.prod(result.shape[1:]) * math.prod(weight.shape[1:])
    if node.op == "ConvTranspose":
        return math.prod(given.shape[1:]) * math.prod(weight.shape[1:])
    depth: int = weight.shape[-1] if node.attributes.get("transB") else weight.shape[-2]
    return math.prod(result.shape[1:]) * depth


def _followers(graph: Graph) -> dict[str, Node]:
    """By tensor: the activation node that is its only reader."""
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes():
        for tensor in node.inputs:
            readers.setdefault(tensor, []).append(node)
    outputs = set(graph.output_names())
    return {
        tensor: found[0]
        for tensor, found in readers.items()
        if len(found) == 1 and found[0].op in _ACTIVATIONS and tensor not in outputs
    }
