"""One variant after its predecessor: which scales it keeps, the quantizer that keeps them, and what the report says."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from hardware.build.calibrate import Statistics
from hardware.build.delta import estimate
from hardware.build.graph import Graph
from hardware.build.layers import Layer
from hardware.build.quantize import Quantizer
from hardware.build.report import ScalesReport, TensorScale
from hardware.build.scales import Scale, decide, scales_of
from hardware.build.variants import Recipe


class Succession:
    """`before` is the predecessor's file, `fresh` quantizes without a look at it."""

    def __init__(
        self,
        before: Graph,
        fresh: Quantizer,
        graph: Graph,
        layers: Sequence[Layer],
        statistics: Statistics,
        recipe: Recipe,
    ) -> None:
        self._before, self._fresh, self._old = before, fresh, scales_of(before)
        self._verdicts = decide(
            self._old, scales_of(fresh.quantize(())), graph.initializers(), largest=recipe.largest_weight
        )
        scales = {name: verdict.scale for name, verdict in self._verdicts.items() if verdict.kept.any()}
        self.has_kept = bool(scales)
        self.quantizer = Quantizer(graph, layers, statistics, recipe, scales) if scales else fresh
        self._refused = "" if scales else "none of the predecessor's fits"

    @property
    def is_refused(self) -> bool:
        """The gate was missed with kept scales."""
        return self.has_kept and bool(self._refused)

    def refuse(self, loss: float, allowed: float) -> None:
        self._refused = f"with the predecessor's the loss is {loss:.4f}, allowed is {allowed:g}"

    def report(self, model: Graph, float_layers: Collection[str]) -> ScalesReport:
        """`model` is what the bundle holds: what is said to be kept was read from it."""
        kept, recomputed = (estimate(self._before, one.quantize(float_layers)) for one in (self.quantizer, self._fresh))
        return ScalesReport(
            is_kept=not self._refused,
            reason=self._refused,
            tensors=tuple(self._tensor(name, scale) for name, scale in sorted(scales_of(model).items())),
            changed_share=kept.changed_share,
            changed_share_recomputed=recomputed.changed_share,
            delta_bytes=kept.size_bytes,
            delta_bytes_recomputed=recomputed.size_bytes,
        )

    def _tensor(self, name: str, scale: Scale) -> TensorScale:
        verdict, old = self._verdicts[name], self._old.get(name)
        kept = 0
        if old is not None and old.steps.shape == scale.steps.shape and old.zero == scale.zero:
            kept = int(np.count_nonzero(old.steps == scale.steps))
        return TensorScale(
            name=name,
            kind="activation" if scale.integers is None else "weight",
            channels=len(scale.steps),
            kept=kept,
            drift=verdict.drift,
            clipped_share=verdict.clipped_share,
            excess_steps=verdict.excess_steps,
            reason=verdict.reason or ("" if kept == len(scale.steps) else self._beyond_the_range()),
        )

    def _beyond_the_range(self) -> str:
        """Why a scale that fits is not what the bundle holds."""
        return "the gate" if self._refused else "the bias would not fit 32 bits"
