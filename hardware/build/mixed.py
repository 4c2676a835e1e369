"""One INT8 variant from recipe to file: quantize everything, leave layers in float until the gate holds, or refuse.

A successor is first tried with its predecessor's scales, for a small delta. Where the gate does not hold at once with
these, they are recomputed before any layer is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import GateRefused
from common.tensors import Array
from hardware.build.calibrate import Statistics
from hardware.build.data import Rows
from hardware.build.graph import Graph
from hardware.build.layers import Layer, mac_share
from hardware.build.noise import decibels, layer_noise
from hardware.build.predecessor import Predecessor
from hardware.build.quantize import Quantizer
from hardware.build.report import LayerReport, ScalesReport, VariantReport
from hardware.build.search import Outcome, search
from hardware.build.sensitivity import by_error_per_mac, output_errors
from hardware.build.session import Session
from hardware.build.spec import Gate
from hardware.build.speed import compare
from hardware.build.succession import Succession
from hardware.build.variants import Recipe
from hardware.gate import Reference, loss, measure

Say = Callable[[str], None]

_NOISE_ROWS = 16
_SENSITIVITY_ROWS = 16
_WORST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What all variants of a model share: its FP32 graph, the rows, and all that was measured on them once."""

    model: str
    gate: Gate
    output: str  # the judged one
    fp32: Path
    graph: Graph
    layers: Sequence[Layer]
    statistics: Statistics
    calibration: Rows
    heldout: Rows
    reference: Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A variant whose file lies in the bundle: its answers to the held-out rows and what was measured."""

    answers: Array
    report: VariantReport


class VariantBuild:
    def __init__(self, measured: Measured, recipe: Recipe, predecessor: Predecessor | None, say: Say) -> None:
        self._measured, self._recipe, self._predecessor, self._say = measured, recipe, predecessor, say
        self._use(Quantizer(measured.graph, measured.layers, measured.statistics, recipe))

    def _use(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer
        self._models: dict[tuple[str, ...], Graph] = {}  # what was tried, by the layers left in float
        self._answers: dict[tuple[str, ...], Array] = {}  # to the held-out rows
        self._losses: dict[tuple[str, ...], float] = {}

    def write(self, folder: Path, *, skip_gate: bool) -> Built:
        """Writes the variant's file into `folder`. Raises `GateRefused`, unless the gate is skipped."""
        measured, recipe = self._measured, self._recipe
        start = self._start()
        succession = self._succeed(start)
        outcome = self._search(start, skip_gate=skip_gate)
        if not outcome.is_held and not skip_gate:
            raise self._refusal(outcome)
        model = self._model(outcome.chosen.float_layers)
        recipe.check(model)
        target = folder / recipe.file
        target.parent.mkdir()
        target.write_bytes(model.serialize())
        speed = None if recipe.is_simulated else compare(measured.fp32, target, next(measured.heldout.feeds(1)))
        if speed is not None:
            self._say(f"{recipe.name}: {speed.ratio:.2f} times FP32's speed")
        answers = self._answers[outcome.chosen.float_layers]
        report = VariantReport(
            name=recipe.name,
            loss=measure(measured.reference, answers),
            is_within_gate=outcome.is_held,
            size_bytes=target.stat().st_size,
            float_layers=outcome.chosen.float_layers,
            float_share=outcome.chosen.float_share,
            tries=len(outcome.tries) + (succession is not None and succession.is_refused),
            is_simulated=recipe.is_simulated,
            milliseconds=None if speed is None else speed.candidate_ms,
            fp32_milliseconds=None if speed is None else speed.reference_ms,
            layers=tuple(self._layer_reports()),
            scales=self._scales(succession, model, outcome.chosen.float_layers),
        )
        return Built(answers=answers, report=report)

    def _succeed(self, start: tuple[str, ...]) -> Succession | None:
        """Goes on with the predecessor's scales where they fit and the gate holds with them."""
        measured, recipe, fresh = self._measured, self._recipe, self._quantizer
        before = None if self._predecessor is None else self._predecessor.graphs.get(recipe.name)
        if before is None:
            return None
        succession = Succession(before, fresh, measured.graph, measured.layers, measured.statistics, recipe)
        if succession.has_kept:
            self._use(succession.quantizer)
            if (loss := self._loss_with(start)) > measured.gate.max_drop:
                self._say(f"{recipe.name}: the gate is missed with the predecessor's scales, they are recomputed")
                succession.refuse(loss, measured.gate.max_drop)
                self._use(fresh)
        return succession

    def _scales(
        self, succession: Succession | None, model: Graph, float_layers: tuple[str, ...]
    ) -> ScalesReport | None:
        if self._predecessor is None:
            return None
        if succession is None:
            return ScalesReport(is_kept=False, reason=f"the predecessor has no variant {self._recipe.name!r}")
        return succession.report(model, float_layers)

    def _worst_first(self) -> tuple[str, ...]:
        measured, name = self._measured, self._recipe.name
        self._say(f"{name}: the gate is missed, looking for the layers to blame")
        errors = output_errors(
            measured.graph,
            self._quantizer,
            measured.layers,
            self._few(_SENSITIVITY_ROWS),
            measured.output,
            is_simulated=self._recipe.is_simulated,
        )
        return by_error_per_mac(measured.layers, errors)

    def _few(self, count: int) -> Rows:
        """Calibration rows, evenly spread: the layers are chosen without a look at the held-out ones."""
        rows = self._measured.calibration
        return rows.take(np.unique(np.linspace(0, len(rows) - 1, count).astype(np.int64)))

    def _search(self, start: Sequence[str], *, skip_gate: bool) -> Outcome:
        measured = self._measured
        return search(
            measured.layers,
            tuple if skip_gate else self._worst_first,
            start,
            self._loss_with,
            max_drop=measured.gate.max_drop,
            max_share=measured.gate.max_float_share,
        )

    def _loss_with(self, float_layers: tuple[str, ...]) -> float:
        if float_layers not in self._losses:
            self._losses[float_layers] = self._measure_loss(float_layers)
        return self._losses[float_layers]

    def _measure_loss(self, float_layers: tuple[str, ...]) -> float:
        session = Session(self._model(float_layers).serialize(), optimized=not self._recipe.is_simulated)
        self._answers[float_layers] = session.run_rows(self._measured.heldout)[self._measured.output]
        value = loss(self._measured.reference, self._answers[float_layers])
        share = mac_share(self._measured.layers, float_layers)
        name = self._recipe.name
        self._say(f"{name}: loss {value:.4f} with {len(float_layers)} layers ({share:.1%} of the MACs) in float")
        return value

    def _model(self, float_layers: tuple[str, ...]) -> Graph:
        if float_layers not in self._models:
            self._models[float_layers] = self._quantizer.quantize(float_layers)
        return self._models[float_layers]

    def _start(self) -> tuple[str, ...]:
        """What the spec wants in float and what the predecessor left there, if this model affords both."""
        measured = self._measured
        predecessor = () if self._predecessor is None else self._predecessor.float_layers.get(self._recipe.name, ())
        known = {layer.name for layer in measured.layers}
        both = (*measured.gate.float_layers, *(name for name in predecessor if name in known))
        start = tuple(dict.fromkeys(both))
        within = mac_share(measured.layers, start) <= measured.gate.max_float_share
        return start if within else measured.gate.float_layers

    def _refusal(self, outcome: Outcome) -> GateRefused:
        best, gate = outcome.chosen, self._measured.gate
        return GateRefused(
            self._measured.model,
            metric=self._measured.reference.metric,
            loss=best.loss,
            allowed=gate.max_drop,
            detail=f"{self._recipe.name} needs more than {gate.max_float_share:.0%} of the MACs in float; best of "
            f"{len(outcome.tries)} tries: {len(best.float_layers)} layers, {best.float_share:.1%}",
            worst_layers=outcome.worst[:_WORST_NAMED],
        )

    def _layer_reports(self) -> list[LayerReport]:
        measured = self._measured
        noise = layer_noise(measured.graph, self._model(()), measured.layers, self._few(_NOISE_ROWS))
        return [
            LayerReport(
                name=layer.name,
                op=layer.op,
                macs=layer.macs,
                sqnr_db=round(decibels(noise[layer.name]), 2) if layer.name in noise else None,
            )
            for layer in measured.layers
        ]
