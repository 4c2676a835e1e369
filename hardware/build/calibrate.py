"""What the calibration rows look like inside the FP32 graph: measured once, used by every variant and every try.

The reductions are part of the graph that runs, so only a few numbers per tensor leave it, whatever the tensor's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import BuildError
from common.tensors import Array
from hardware.build.data import Rows
from hardware.build.graph import Graph
from hardware.build.layers import Layer
from hardware.build.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """`ranges`: (lowest, highest) by tensor. `means`: by layer, its input's mean per channel, float64 [channels]."""

    ranges: dict[str, tuple[float, float]]
    means: dict[str, Array]


def calibrate(graph: Graph, layers: Sequence[Layer], rows: Rows, *, batch: int = 8) -> Statistics:
    """One pass over `rows`. Ranges contain 0, as integer zero points need. `BuildError` for values not finite."""
    probed = graph.copy()
    tensors = _float_tensors(graph)
    for tensor in tensors:
        probed.add_node("ReduceMin", [tensor], f"{tensor}:min", keepdims=0)
        probed.add_node("ReduceMax", [tensor], f"{tensor}:max", keepdims=0)
        probed.add_output(f"{tensor}:min")
        probed.add_output(f"{tensor}:max")
    averaged = {layer.input: layer.spatial_axes for layer in layers if layer.op in ("Conv", "Gemm")}
    for tensor, axes in averaged.items():
        probed.add_mean(tensor, f"{tensor}:mean", axes)
        probed.add_output(f"{tensor}:mean")
    session = Session(probed.serialize())

    lows = dict.fromkeys(tensors, 0.0)
    highs = dict.fromkeys(tensors, 0.0)
    sums: dict[str, Array] = {}
    for feeds in rows.feeds(batch):
        seen = session.run(feeds)
        for tensor in tensors:
            low, high = float(seen[f"{tensor}:min"]), float(seen[f"{tensor}:max"])
            if not np.isfinite([low, high]).all():
                raise BuildError(f"tensor {tensor!r} is not finite on the calibration inputs")
            lows[tensor], highs[tensor] = min(lows[tensor], low), max(highs[tensor], high)
        for tensor in averaged:
            sums[tensor] = sums.get(tensor, 0.0) + seen[f"{tensor}:mean"].astype(np.float64).sum(axis=0)
    return Statistics(
        ranges={tensor: (lows[tensor], highs[tensor]) for tensor in tensors},
        means={layer.name: sums[layer.input] / len(rows) for layer in layers if layer.input in averaged},
    )


def _float_tensors(graph: Graph) -> list[str]:
    """The activations: float inputs and float results, by the shapes that were inferred."""
    integer = graph.non_float_tensors()
    names = [*graph.input_names(), *(out for node in graph.nodes() for out in node.outputs if out)]
    return [name for name in names if name not in integer]
