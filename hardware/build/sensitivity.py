"""What rounding one layer alone does to the model's answer, for every layer: the order in which they are left in float.

A layer's own noise (`hardware/build/noise.py`) is no guide here: late layers are noisy and harmless, while in
EfficientNet-Lite0 most of the loss comes from the first three of fifty. So each layer is quantized by itself once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hardware.build.data import Rows
from hardware.build.graph import Graph
from hardware.build.layers import Layer
from hardware.build.quantize import Quantizer
from hardware.build.session import Session


def output_errors(
    graph: Graph, quantizer: Quantizer, layers: Sequence[Layer], rows: Rows, output: str, *, is_simulated: bool
) -> dict[str, float]:
    """By layer: error power over signal power at `output` with that layer quantized and all others in float."""
    wanted = Session(graph.serialize()).run_rows(rows)[output].astype(np.float64)
    power = max(float((wanted**2).sum()), 1e-30)
    errors = {}
    for layer in layers:
        alone = quantizer.quantize([other.name for other in layers if other is not layer])
        given = Session(alone.serialize(), optimized=not is_simulated).run_rows(rows)[output]
        errors[layer.name] = float(((given - wanted) ** 2).sum()) / power
    return errors


def by_error_per_mac(layers: Sequence[Layer], errors: dict[str, float]) -> tuple[str, ...]:
    """Layer names, the worst bargain for INT8 first."""
    ranked = sorted(layers, key=lambda layer: (-errors[layer.name] / max(1, layer.macs), layer.name))
    return tuple(layer.name for layer in ranked)
