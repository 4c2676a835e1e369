"""What a quantized model loses against FP32, and whether that is still good enough.

Owns the three metrics, their 90 % intervals and the verdict on the golden set. The same code judges at build time (on
the held-out set) and on every node (on the bundle's few golden rows), so it needs nothing but numpy.

* ``accuracy``: with true labels; FP32's accuracy minus the candidate's.
* ``expected_accuracy``: without labels; ``1 - E[p(top1 of candidate)] / E[p(top1 of FP32)]`` where p is FP32's
  posterior. A flip between two classes that FP32 finds equally likely costs nothing, a confident answer lost costs all.
* ``cosine``: for embeddings and plain tensors; one minus the mean cosine of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from common.bundle import BundleSpec
from common.errors import BundleError
from common.tensors import Array, Tensors

Metric = Literal["accuracy", "expected_accuracy", "cosine"]
Posterior = Literal["softmax", "identity"]

RESAMPLES = 2000
FLIPPED_ROWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss and its 90 % bootstrap interval, resampled by group (all crops of a photo come or go together)."""

    metric: Metric
    value: float
    low: float
    high: float
    rows: int
    groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    metric: Metric
    loss: float  # inf where the outputs could not be compared at all
    allowed: float
    passed: bool
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """FP32's answers to some rows: `outputs` float [rows, ...], `labels` and `groups` int64 [rows] where known."""

    metric: Metric
    outputs: Array
    labels: Array | None = None
    groups: Array | None = None
    posterior: Posterior = "softmax"


def loss(reference: Reference, candidate: Array) -> float:
    """The metric's loss of `candidate` (shaped like the reference's outputs) over all rows."""
    have, want = _scores(reference, candidate)
    return _REDUCE[reference.metric](have.sum(), want.sum(), len(have))


def measure(reference: Reference, candidate: Array, *, seed: int = 0) -> Loss:
    """`loss` with its interval: groups are drawn with replacement, the metric is taken over the rows drawn."""
    have, want = _scores(reference, candidate)
    groups = np.arange(len(have)) if reference.groups is None else reference.groups
    _, index = np.unique(groups, return_inverse=True)
    sums = np.stack([np.bincount(index, weights=w) for w in (have, want, np.ones(len(have)))])
    count = sums.shape[1]
    drawn = np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))
    resampled = [_REDUCE[reference.metric](*sums[:, pick].sum(axis=1)) for pick in drawn]
    low, high = np.quantile(resampled, (0.05, 0.95))
    value = _REDUCE[reference.metric](have.sum(), want.sum(), len(have))
    return Loss(metric=reference.metric, value=value, low=float(low), high=float(high), rows=len(have), groups=count)


def allowance(metric: Metric, golden_loss: float, max_drop: float, rows: int) -> float:
    """What a node's engine may lose on the golden rows, given what the build's own engine lost on them.

    Both run the same file on the same rows, so sampling plays no part: only kernels differ (rounding, fusion,
    accumulation order). That can flip rows that are near a tie; two flipped rows are allowed for, at their highest
    price of 1/rows each. Cosines have no ties: there the margin is `max_drop`. A model that collapsed answers at
    random and loses most of 1, far over either.
    """
    margin = max_drop if metric == "cosine" else FLIPPED_ROWS / rows
    return max(max_drop, golden_loss) + margin


def judge(spec: BundleSpec, variant: str, golden: Tensors, outputs: Tensors) -> GateResult:
    """A node's verdict on an engine: `outputs` are its answers to the golden inputs, by output name.

    Every output of the golden set must be there, shaped like FP32's and finite; the metric is taken on the first one.
    Raises `BundleError` when the bundle allows no loss for `variant` or its golden set has no such output.
    """
    if variant not in spec.golden.max_loss:
        raise BundleError(spec.model.name, f"its golden set has no max_loss for variant {variant!r}")
    metric, allowed = spec.golden.metric, spec.golden.max_loss[variant]
    first = f"output.{spec.model.outputs[0].name}"
    if first not in golden:
        raise BundleError(spec.model.name, f"its golden set has no {first!r}")
    problem = _mismatch(golden, outputs)
    if problem:
        return GateResult(metric=metric, loss=float("inf"), allowed=allowed, passed=False, problem=problem)
    reference = Reference(
        metric=metric, outputs=golden[first], labels=golden.get("labels"), posterior=spec.model.posterior
    )
    value = loss(reference, outputs[spec.model.outputs[0].name])
    return GateResult(metric=metric, loss=value, allowed=allowed, passed=bool(value <= allowed))


def _mismatch(golden: Tensors, outputs: Tensors) -> str:
    for key, want in golden.items():
        if not key.startswith("output."):
            continue
        name = key.removeprefix("output.")
        if name not in outputs:
            return f"output {name!r} is missing"
        got = outputs[name]
        if got.shape != want.shape:
            return f"output {name!r} has shape {list(got.shape)}, FP32's is {list(want.shape)}"
        if got.dtype.kind not in "fiub" or not np.isfinite(got).all():
            return f"output {name!r} is not finite numbers"
    return ""


def _scores(reference: Reference, candidate: Array) -> tuple[Array, Array]:
    """Per row: what the candidate scores and what FP32 scores."""
    if candidate.shape != reference.outputs.shape:
        raise ValueError(f"candidate has shape {candidate.shape}, FP32's outputs have {reference.outputs.shape}")
    wanted = reference.outputs.reshape(len(candidate), -1).astype(np.float64)
    given = candidate.reshape(len(candidate), -1).astype(np.float64)
    if reference.metric == "cosine":
        norms = np.linalg.norm(wanted, axis=1) * np.linalg.norm(given, axis=1)
        cosine = np.divide((wanted * given).sum(axis=1), norms, out=np.zeros(len(given)), where=norms > 0)
        return cosine, np.ones(len(given))
    rows = np.arange(len(given))
    answer, wanted_answer = _top1(given), wanted.argmax(axis=1)
    if reference.metric == "accuracy":
        if reference.labels is None:
            raise ValueError("the accuracy metric needs labels")
        return (answer == reference.labels).astype(np.float64), (wanted_answer == reference.labels).astype(np.float64)
    posterior = _softmax(wanted) if reference.posterior == "softmax" else wanted
    return np.where(answer < 0, 0.0, posterior[rows, answer]), posterior[rows, wanted_answer]


def _top1(scores: Array) -> Array:
    """Index of the largest finite score; -1 (never right) for a row with anything else in it."""
    return np.where(np.isfinite(scores).all(axis=1), scores.argmax(axis=1), -1)


def _softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))


def _difference(have: float, want: float, rows: float) -> float:
    return _known((want - have) / rows)


def _ratio(have: float, want: float, rows: float) -> float:
    return _known(1 - have / want) if want > 0 else math.inf


def _known(value: float) -> float:
    """A loss that cannot be computed is not one that may pass."""
    return float(value) if math.isfinite(value) else math.inf


_REDUCE: dict[Metric, Callable[[float, float, float], float]] = {
    "accuracy": _difference,
    "expected_accuracy": _ratio,
    "cosine": _difference,
}
