"""An ONNX graph that can be looked at and added to. The build's only importer of onnx.

Owns loading, naming, probes (extra outputs) and byte-stable serialization: the same content gives the same bytes,
whatever order a tool left the tensors in, so that a release pays for nothing that did not change.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

from common.errors import BuildError
from common.tensors import Array
from hardware.build.session import fold_constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator: its name, type, tensor names in and out, and attributes."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


class Graph:
    def __init__(self, proto: Any) -> None:
        self.proto = proto

    @classmethod
    def load(cls, path: Path, *, is_checked: bool = True) -> Graph:
        """Reads and checks an ONNX file; raises `BuildError` for anything else. Unchecked, it only has to parse."""
        try:
            proto = onnx.load(str(path))
            if is_checked:
                onnx.checker.check_model(proto)
        except OSError as exc:
            raise BuildError(f"{path} cannot be read: {exc.strerror or exc}") from exc
        except (DecodeError, onnx.checker.ValidationError) as exc:
            raise BuildError(f"{path} is not a valid ONNX model: {exc}") from exc
        return cls(proto)

    def copy(self) -> Graph:
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        return Graph(proto)

    def serialize(self) -> bytes:
        """Deterministic bytes of the model."""
        return bytes(self.proto.SerializeToString(deterministic=True))

    def nodes(self) -> Iterator[Node]:
        for node in self.proto.graph.node:
            attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
            yield Node(
                name=node.name,
                op=node.op_type,
                inputs=tuple(node.input),
                outputs=tuple(node.output),
                attributes=attributes,
            )

    def initializers(self) -> dict[str, Array]:
        return {item.name: numpy_helper.to_array(item) for item in self.proto.graph.initializer}

    def set_initializer(self, name: str, array: Array) -> None:
        """Replaces the initializer `name`, or adds it."""
        tensor = numpy_helper.from_array(array, name)
        for item in self.proto.graph.initializer:
            if item.name == name:
                item.CopyFrom(tensor)
                return
        self.proto.graph.initializer.append(tensor)

    def input_names(self) -> tuple[str, ...]:
        constants = {item.name for item in self.proto.graph.initializer}
        return tuple(item.name for item in self.proto.graph.input if item.name not in constants)

    def output_names(self) -> tuple[str, ...]:
        return tuple(item.name for item in self.proto.graph.output)

    def non_float_tensors(self) -> set[str]:
        """Tensors that shape inference knows to be something other than float32."""
        known = [*self.proto.graph.input, *self.proto.graph.value_info, *self.proto.graph.output]
        return {item.name for item in known if item.type.tensor_type.elem_type != onnx.TensorProto.FLOAT}

    def set_input(self, node: str, position: int, tensor: str) -> None:
        """Makes `tensor` the input of the named node at `position`, appending it where there was none."""
        for item in self.proto.graph.node:
            if item.name == node:
                item.input.extend([""] * (position + 1 - len(item.input)))
                item.input[position] = tensor
                return
        raise KeyError(node)

    def add_node(self, op: str, inputs: Iterable[str], output: str, **attributes: Any) -> None:
        self.proto.graph.node.append(helper.make_node(op, list(inputs), [output], name=f"{op}:{output}", **attributes))

    def insert_before(self, node: str, op: str, inputs: Iterable[str], output: str) -> None:
        """Like `add_node`, at the place of the named node, where its inputs already exist and its readers follow."""
        position = next(i for i, item in enumerate(self.proto.graph.node) if item.name == node)
        made = helper.make_node(op, list(inputs), [output], name=f"{op}:{output}")
        self.proto.graph.node.insert(position, made)

    def add_mean(self, tensor: str, output: str, axes: list[int]) -> None:
        """The mean of `tensor` over `axes`, which leaves the other dimensions (all of them for no axes)."""
        if not axes:
            self.add_node("Identity", [tensor], output)
        elif self._opset() < 18:
            self.add_node("ReduceMean", [tensor], output, axes=axes, keepdims=0)
        else:  # there the axes became an input
            self.set_initializer(f"{output}:axes", np.asarray(axes, dtype=np.int64))
            self.add_node("ReduceMean", [tensor, f"{output}:axes"], output, keepdims=0)

    def add_output(self, tensor: str) -> None:
        if tensor not in self.output_names():
            self.proto.graph.output.append(helper.make_tensor_value_info(tensor, onnx.TensorProto.FLOAT, None))

    def _opset(self) -> int:
        return max(int(item.version) for item in self.proto.opset_import if item.domain in ("", "ai.onnx"))

    def prefixed(self, prefix: str) -> Graph:
        """A copy in which every node and tensor but the graph's inputs bears `prefix`."""
        kept = set(self.input_names()) | {""}
        graph = self.copy()
        for node in graph.proto.graph.node:
            node.name = prefix + node.name
            for names in (node.input, node.output):
                names[:] = [name if name in kept else prefix + name for name in names]
        for items in (graph.proto.graph.initializer, graph.proto.graph.output, graph.proto.graph.value_info):
            for item in items:
                item.name = item.name if item.name in kept else prefix + item.name
        return graph

    def absorb(self, other: Graph) -> None:
        """Puts the other graph's nodes and constants before this one's; both read the same inputs."""
        merged = list(other.proto.graph.node) + list(self.proto.graph.node)
        del self.proto.graph.node[:]
        self.proto.graph.node.extend(merged)
        self.proto.graph.initializer.extend(other.proto.graph.initializer)


def simplify(source: Path) -> Graph:
    """The model with constants folded, every node named, tensors in a stable order and shapes inferred."""
    with tempfile.TemporaryDirectory(prefix="outrider-fold-") as folder:
        folded = Path(folder) / "model.onnx"
        fold_constants(source, folded)
        graph = Graph.load(folded)
    graph.proto.CopyFrom(onnx.shape_inference.infer_shapes(graph.proto))
    for node in graph.proto.graph.node:
        if not node.name:
            node.name = f"{node.op_type}:{node.output[0]}"
    return canonical(graph)


def canonical(graph: Graph) -> Graph:
    """Constants sorted by name, nodes after what they read, only the operator sets in use, nothing about the tool."""
    proto = graph.proto
    nodes = _sorted(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    constants = sorted(proto.graph.initializer, key=lambda item: item.name)
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(constants)
    domains = {"", *(node.domain for node in proto.graph.node)}
    opsets = [item for item in proto.opset_import if item.domain in domains]
    del proto.opset_import[:]
    proto.opset_import.extend(sorted(opsets, key=lambda item: item.domain))
    del proto.metadata_props[:]
    proto.producer_name, proto.producer_version, proto.doc_string = "outrider", "", ""
    return graph


def _sorted(nodes: Iterable[Any]) -> list[Any]:
    """As ONNX demands it: after the nodes whose outputs they read, otherwise in the given order.

    The quantizer puts what it adds at the end, and ONNX Runtime does not mind; `onnx.checker` and other readers do.
    """
    waiting = list(nodes)
    unmade = {output for node in waiting for output in node.output}
    ordered: list[Any] = []
    while waiting:
        left = []
        for node in waiting:
            if unmade.isdisjoint(_read_by(node)):
                unmade.difference_update(node.output)
                ordered.append(node)
            else:
                left.append(node)
        if len(left) == len(waiting):  # a cycle: not ours to mend
            return ordered + left
        waiting = left
    return ordered


def _read_by(node: Any) -> set[str]:
    """Tensors that a node needs, those that its inner graphs (of If, Loop, Scan) take from around it too."""
    inner = [item.g for item in node.attribute if item.HasField("g")]
    return set(node.input).union(*(_read_by(one) for graph in inner for one in graph.node))
