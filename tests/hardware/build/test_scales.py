"""Which scales a successor keeps, and the delta that it is about: rules on arrays, worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from common.tensors import Array
from hardware.build.delta import estimate
from hardware.build.graph import Graph
from hardware.build.scales import Scale, Verdict, decide


def weight_scale(steps: list[float], shape: tuple[int, ...], axis: int | None = 0) -> Scale:
    return Scale(
        steps=np.array(steps, np.float32), zero=np.array(0, np.int8), axis=axis, integers=np.zeros(shape, np.int8)
    )


def of_rows(rows: list[list[float]], old: list[float], largest: int = 127) -> Verdict:
    """The verdict on a weight of these rows, whose channels had the steps `old`."""
    weight = np.array(rows, np.float32)
    new = weight_scale([max(map(abs, row)) / largest for row in rows], weight.shape)
    return decide({"w": weight_scale(old, weight.shape)}, {"w": new}, {"w": weight}, largest=largest)["w"]


@pytest.mark.parametrize(
    ("farthest", "is_kept"),  # in steps of the old scale, whose range ends at 127
    [(127.0, True), (128.9, True), (-128.9, True), (129.1, False), (-200.0, False), (64.0, True), (63.0, False)],
)
def test_a_channel_keeps_its_scale_while_its_range_fits(farthest: float, is_kept: bool) -> None:
    verdict = of_rows([[farthest * 0.5, 1.0, 0.0], [127.0, 0.0, 0.0]], [0.5, 1.0])
    assert verdict.kept.tolist() == [is_kept, True]
    assert verdict.scale.steps.tolist() == pytest.approx([0.5 if is_kept else abs(farthest) * 0.5 / 127, 1.0])
    assert verdict.drift == pytest.approx(1.0 if farthest == 127.0 else abs(farthest) / 127)
    assert bool(verdict.reason) is not is_kept
    # one of six weights is clipped if it rounds to more than 127
    assert verdict.clipped_share == pytest.approx(1 / 6 if is_kept and abs(farthest) > 127.5 else 0.0)
    assert verdict.excess_steps == pytest.approx(max(0.0, abs(farthest) - 127) if is_kept else 0.0, abs=1e-3)


def test_more_than_five_clipped_weights_in_a_thousand_are_too_many() -> None:
    rows = np.zeros((2, 1000), np.float32)
    rows[0, :5] = rows[1, :6] = 65.0
    assert of_rows(rows.tolist(), [1.0, 1.0], largest=64).kept.tolist() == [True, False]


def test_the_reason_counts_the_channels() -> None:
    verdict = of_rows([[300.0], [250.0], [10.0], [127.0]], [1.0] * 4)
    assert verdict.reason == "outside the old range: 2 of 4 channels; less than 0.5 of the old range: 1 of 4 channels"


def test_a_scale_that_a_large_bias_has_set_is_compared_with_its_like() -> None:
    """The quantizer widens the steps of a channel of tiny weights, so that its bias fits 32 bits: before and now."""
    weight = np.array([[1.0], [0.0]], np.float32)
    old, new = weight_scale([4.0, 4.0], weight.shape), weight_scale([4.1, 1.0], weight.shape)
    verdict = decide({"w": old}, {"w": new}, {"w": weight}, largest=64)["w"]
    assert verdict.kept.tolist() == [True, True]
    assert verdict.drift == pytest.approx(4.1 / 4)


def test_channels_along_another_axis_are_told_apart() -> None:
    weight = np.array([[127.0, 1.0], [5.0, 200.0]], np.float32)
    old = weight_scale([1.0, 1.0], weight.shape, axis=1)
    new = weight_scale([1.0, 200 / 127], weight.shape, axis=1)
    assert decide({"w": old}, {"w": new}, {"w": weight}, largest=127)["w"].kept.tolist() == [True, False]


def activation(step: float, zero: int) -> Scale:
    return Scale(steps=np.array([step], np.float32), zero=np.array(zero, np.uint8), axis=None)


@pytest.mark.parametrize(
    ("new", "is_kept"),  # the old range is -10..245
    [
        (activation(1.0, 10), True),
        (activation(259 / 255, 10), True),  # about -10.2..248.8
        (activation(262 / 255, 10), False),  # 251.7: more than 4 steps outside
        (activation(1.0, 15), False),  # -15
        (activation(0.51, 10), True),
        (activation(0.49, 10), False),
    ],
)
def test_an_activation_keeps_its_scale_while_its_range_fits(new: Scale, is_kept: bool) -> None:
    old = activation(1.0, 10)
    verdict = decide({"x": old}, {"x": new}, {}, largest=64)["x"]
    assert verdict.kept.tolist() == [is_kept]
    assert verdict.scale is (old if is_kept else new)
    assert verdict.drift == pytest.approx(float(new.steps[0]))
    assert verdict.clipped_share is None


@pytest.mark.parametrize(
    ("old", "reason"),
    [
        (None, "not quantized in the predecessor"),
        (weight_scale([1.0, 1.0, 1.0], (3, 2)), "its shape was [3, 2], it is [2, 2]"),
        (weight_scale([1.0], (2, 2), axis=None), "quantized in another way in the predecessor"),
        (weight_scale([1.0, 1.0], (2, 2), axis=1), "quantized in another way in the predecessor"),
        (weight_scale([1.0, 0.0], (2, 2)), "the predecessor's scale is no positive float32 number"),
        (weight_scale([1.0, math.nan], (2, 2)), "the predecessor's scale is no positive float32 number"),
        (activation(1.0, 0), "quantized in another way in the predecessor"),
    ],
)
def test_a_scale_of_another_tensor_is_not_kept(old: Scale | None, reason: str) -> None:
    new = weight_scale([1.0, 1.0], (2, 2))
    verdict = decide({} if old is None else {"w": old}, {"w": new}, {"w": np.full((2, 2), 127.0)}, largest=127)["w"]
    assert (verdict.kept.tolist(), verdict.reason) == ([False, False], reason)
    assert verdict.scale is new


def test_a_step_next_to_nothing_is_outside_without_a_warning() -> None:
    assert of_rows([[1e30]], [1e-38]).kept.tolist() == [False]


def graph_of(**constants: Array) -> Graph:
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    return Graph(helper.make_model(helper.make_graph([], "constants", [], [], tensors)))


def test_the_delta_is_the_entropy_of_the_differences() -> None:
    base = np.array([0, 1, 2, 3, -128, 5, 6, 7], np.int8)
    moved = base.copy()
    moved[:4] += 1  # half 0, half 1: one bit for each of 8
    moved[4] = -128
    floats = np.ones(4, np.float32)
    same = estimate(graph_of(a=base, f=floats), graph_of(a=base, f=floats))
    assert (same.changed_share, same.size_bytes) == (0.0, 0)
    delta = estimate(graph_of(a=base, f=floats), graph_of(a=moved, f=floats))
    assert (delta.changed_share, delta.size_bytes) == (0.5, 1)
    # a constant that is new, or has another shape, is fetched in full
    new = estimate(graph_of(a=base), graph_of(a=base.reshape(2, 4), f=floats))
    assert (new.changed_share, new.size_bytes) == (1.0, 8 + 16)


def test_every_variant_is_a_valid_onnx_file(bundle_v2: Path) -> None:
    for variant in ("trt-int8", "cpu-int8", "full"):
        onnx.checker.check_model(str(bundle_v2 / variant / "model.onnx"), full_check=True)
