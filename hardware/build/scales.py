"""Quantization scales: read off a Q/DQ graph, and the rule by which a successor keeps those of its predecessor.

While the step between two integers stays, an integer changes only where its weight has crossed from one to the next; a
new step moves a share of all integers for nothing, and every int32 bias with them. So a scale is kept, channel by
channel, while the new values fit its range: few are clipped, by little, and the range is not so wide by now that
resolution is lost. What that costs in accuracy the gate decides. Rules on arrays only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from common.tensors import Array
from hardware.build.graph import Graph

MAX_CLIPPED_SHARE = 0.005  # of a channel's weights; one weight is always allowed
MAX_EXCESS_STEPS = 2.0  # of the farthest clipped weight, in steps of 1 / 64 or 1 / 127 of the range
MAX_ACTIVATION_EXCESS_STEPS = 4.0  # of 255: by how much a tensor may leave its range at either end
MIN_RANGE = 0.5  # of the old range: below, a new scale gains a bit


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Of one tensor: the step of each channel, float32 [channels], or [1] for the whole tensor."""

    steps: Array
    zero: Array  # zero point, the same in all channels: [] of the type of the integers
    axis: int | None  # of the channels; None: one step for the whole tensor
    integers: Array | None = None  # a constant's; None for an activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of the scale of one tensor, and why."""

    scale: Scale  # the new one: kept steps where `kept`, recomputed ones elsewhere
    kept: Array  # bool [channels]
    drift: float | None = None  # new range / old range in the channel where it is farthest from 1
    clipped_share: float | None = None  # of the tensor: weights beyond a kept range; None for an activation
    excess_steps: float = 0.0  # how far beyond a kept range the farthest value is
    reason: str = ""  # why not all channels are kept


def scales_of(graph: Graph) -> dict[str, Scale]:
    """By the name that the tensor has in FP32: scales of 8 bit tensors (an int32 bias has the product of two)."""
    constants = graph.initializers()
    found = {}
    for node in graph.nodes():
        if node.op not in ("QuantizeLinear", "DequantizeLinear") or len(node.inputs) < 3:
            continue
        steps, zero = constants.get(node.inputs[1]), constants.get(node.inputs[2])
        integers = constants.get(node.inputs[0])
        if steps is None or zero is None or zero.dtype.itemsize != 1 or steps.ndim > 1 or not steps.size:
            continue
        if (integers is None) != (node.op == "QuantizeLinear") or zero.size == 0 or (zero != zero.flat[0]).any():
            continue
        name = node.inputs[1].removesuffix("_scale") if integers is None else node.inputs[0].removesuffix("_quantized")
        found[name] = Scale(
            steps=steps.reshape(-1),
            zero=zero.reshape(-1)[0],
            axis=node.attributes.get("axis", 1) if steps.ndim else None,
            integers=integers,
        )
    return found


def decide(
    old: Mapping[str, Scale], new: Mapping[str, Scale], weights: Mapping[str, Array], *, largest: int
) -> dict[str, Verdict]:
    """By tensor of `new` (the scales as recomputed). `weights` are FP32's, `largest` is that of their integers."""
    return {name: _verdict(old.get(name), scale, weights.get(name), largest) for name, scale in new.items()}


def _verdict(old: Scale | None, new: Scale, weight: Array | None, largest: int) -> Verdict:
    if (reason := _mismatch(old, new, weight)) is not None or old is None:
        return Verdict(scale=new, kept=np.zeros(len(new.steps), dtype=bool), reason=str(reason))
    return _of_activation(old, new) if weight is None else _of_weight(old, new, weight, largest)


def _mismatch(old: Scale | None, new: Scale, weight: Array | None) -> str | None:
    """Why the old scale cannot be the new one, whatever the values are."""
    if old is None:
        return "not quantized in the predecessor"
    if (old.integers is None) != (new.integers is None) or old.zero.dtype != new.zero.dtype or old.axis != new.axis:
        return "quantized in another way in the predecessor"
    if old.integers is not None and new.integers is not None and old.integers.shape != new.integers.shape:
        return f"its shape was {list(old.integers.shape)}, it is {list(new.integers.shape)}"
    if len(old.steps) != len(new.steps):
        return "quantized in another way in the predecessor"
    if old.steps.dtype != np.float32 or not np.isfinite(old.steps).all() or not (old.steps > 0).all():
        return "the predecessor's scale is no positive float32 number"
    if new.integers is not None and (weight is None or new.zero.dtype != np.int8 or new.zero != 0 or old.zero != 0):
        return "a constant with a zero point"
    return None


def _of_weight(old: Scale, new: Scale, weight: Array, largest: int) -> Verdict:
    rows = weight.reshape(1, -1) if old.axis is None else np.moveaxis(weight, old.axis, 0).reshape(len(old.steps), -1)
    with np.errstate(over="ignore"):  # an old step next to 0: infinitely far outside
        in_steps, ratio = np.abs(rows / old.steps[:, None]), new.steps / old.steps
    farthest = in_steps.max(axis=1, initial=0.0)
    clipped = (np.rint(in_steps) > largest).sum(axis=1)
    is_outside = (clipped > np.maximum(1, MAX_CLIPPED_SHARE * rows.shape[1])) | (farthest - largest > MAX_EXCESS_STEPS)
    is_same = (old.steps == new.steps) | (farthest == 0)  # zeros are zeros with any step
    is_narrow = ratio < MIN_RANGE  # by the steps, not the weights: a large int32 bias may have set both
    kept = ~(is_outside | is_narrow) | is_same
    return Verdict(
        scale=replace(new, steps=np.where(kept, old.steps, new.steps)),
        kept=kept,
        drift=_farthest_from_1(np.where(is_same, 1.0, ratio)),
        clipped_share=float(clipped[kept].sum() / max(1, rows.size)),
        excess_steps=float(np.maximum(0, farthest[kept] - largest).max(initial=0.0)),
        reason=_reason(int((is_outside & ~kept).sum()), int((is_narrow & ~is_outside & ~kept).sum()), len(kept)),
    )


def _of_activation(old: Scale, new: Scale) -> Verdict:
    """By the ranges alone: of an activation no more is measured."""
    (old_low, old_high), (low, high) = _range(old), _range(new)
    excess = max(0.0, old_low - low, high - old_high) / float(old.steps[0])
    drift = (high - low) / (old_high - old_low)
    is_outside, is_narrow = excess > MAX_ACTIVATION_EXCESS_STEPS, drift < MIN_RANGE
    is_same = bool(old.steps[0] == new.steps[0]) and old.zero == new.zero
    is_kept = is_same or not (is_outside or is_narrow)
    return Verdict(
        scale=old if is_kept else new,
        kept=np.array([is_kept]),
        drift=drift,
        excess_steps=excess if is_kept else 0.0,
        reason="" if is_kept else _reason(int(is_outside), int(is_narrow and not is_outside), 1),
    )


def _range(scale: Scale) -> tuple[float, float]:
    limits, zero, step = np.iinfo(scale.zero.dtype), int(scale.zero), float(scale.steps[0])
    return (limits.min - zero) * step, (limits.max - zero) * step


def _farthest_from_1(ratios: Array) -> float:
    return float(ratios[np.abs(np.log(np.maximum(ratios, 1e-30))).argmax()])


def _reason(outside: int, narrow: int, channels: int) -> str:
    of = f" of {channels} channels" if channels > 1 else ""
    said = [f"outside the old range{f': {outside}' if of else ''}{of}"] if outside else []
    said += [f"less than {MIN_RANGE:g} of the old range{f': {narrow}' if of else ''}{of}"] if narrow else []
    return "; ".join(said)
