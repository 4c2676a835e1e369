"""The three metrics against arithmetic by hand, and the verdict on a golden set."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from common.bundle import BundleSpec, GoldenSpec, ModelConfig, Variant
from common.errors import BundleError
from common.tensors import Array, TensorSpec
from hardware.gate import Reference, allowance, judge, loss, measure


def logits(*rows: list[float]) -> Array:
    """Logits whose softmax is exactly the probabilities given."""
    return np.log(np.array(rows))


def spec(metric: str = "accuracy", allowed: float = 0.1) -> BundleSpec:
    return BundleSpec(
        model=ModelConfig(
            name="m",
            task="classification",
            inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 2)),),
            outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 2)),),
        ),
        variants=(Variant(name="cpu-int8", files={"onnxruntime": ("cpu-int8/model.onnx",)}),),
        golden=GoldenSpec(file="golden.safetensors", metric=metric, max_loss={"cpu-int8": allowed}),  # type: ignore[arg-type]
    )


def golden(rows: int = 10) -> dict[str, Array]:
    outputs = np.tile(np.array([[2.0, 0.0]], np.float32), (rows, 1))
    return {"input.x": np.zeros((rows, 2), np.float32), "output.y": outputs, "labels": np.zeros(rows, np.int64)}


def test_expected_accuracy_is_what_fp32_thinks_of_the_candidates_answers() -> None:
    fp32 = logits([0.6, 0.3, 0.1], [0.5, 0.4, 0.1])
    candidate = np.array([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])  # answers 2 and 1: FP32 gives them .1 and .4
    reference = Reference(metric="expected_accuracy", outputs=fp32)
    assert loss(reference, candidate) == pytest.approx(1 - (0.1 + 0.4) / (0.6 + 0.5))


def test_a_flip_between_equally_likely_classes_costs_nothing() -> None:
    reference = Reference(metric="expected_accuracy", outputs=logits([0.45, 0.45, 0.1]))
    assert loss(reference, np.array([[0.0, 1.0, 0.0]])) == pytest.approx(0.0)


def test_expected_accuracy_takes_probabilities_as_they_are() -> None:
    reference = Reference(metric="expected_accuracy", outputs=np.array([[0.8, 0.2]]), posterior="identity")
    assert loss(reference, np.array([[0.0, 1.0]])) == pytest.approx(1 - 0.2 / 0.8)


def test_accuracy_loss_is_fp32s_accuracy_minus_the_candidates() -> None:
    labels = np.array([0, 0, 1, 1])
    fp32 = np.array([[1.0, 0], [1, 0], [0, 1], [1, 0]])  # 3 of 4 right
    candidate = np.array([[1.0, 0], [0, 1], [1, 0], [1, 0]])  # 1 of 4 right
    assert loss(Reference(metric="accuracy", outputs=fp32, labels=labels), candidate) == pytest.approx(0.5)


def test_cosine_loss_is_one_minus_the_mean_cosine() -> None:
    fp32 = np.array([[1.0, 0.0], [0.0, 2.0]])
    candidate = np.array([[3.0, 0.0], [1.0, 0.0]])  # same direction, right angle
    assert loss(Reference(metric="cosine", outputs=fp32), candidate) == pytest.approx(0.5)


def test_a_row_that_is_not_finite_is_a_wrong_answer() -> None:
    reference = Reference(metric="accuracy", outputs=np.array([[1.0, 0.0]] * 2), labels=np.array([0, 0]))
    assert loss(reference, np.array([[1.0, 0.0], [np.nan, 0.0]])) == pytest.approx(0.5)


def test_the_interval_is_resampled_by_photo_not_by_crop() -> None:
    labels, fp32 = np.zeros(40, np.int64), np.tile([[1.0, 0.0]], (40, 1))
    candidate = fp32.copy()
    candidate[:10] = [0.0, 1.0]  # all crops of the first of four photos are lost
    photos = np.repeat(np.arange(4), 10)
    by_photo = measure(Reference(metric="accuracy", outputs=fp32, labels=labels, groups=photos), candidate)
    by_crop = measure(Reference(metric="accuracy", outputs=fp32, labels=labels), candidate)
    assert by_photo.value == by_crop.value == pytest.approx(0.25)
    assert (by_photo.groups, by_crop.groups) == (4, 40)
    assert by_photo.low == pytest.approx(0.0)  # (3/4)^4 = 32 % of the draws miss the bad photo
    assert by_photo.high - by_photo.low > 2 * (by_crop.high - by_crop.low)
    assert by_crop.low < by_crop.value < by_crop.high


def test_the_interval_of_one_photo_is_its_loss() -> None:
    outputs = np.array([[1.0, 0.0]] * 4)
    candidate = np.array([[1.0, 0.0]] * 3 + [[0.0, 1.0]])
    groups, labels = np.zeros(4, np.int64), np.zeros(4, np.int64)
    one = measure(Reference(metric="accuracy", outputs=outputs, labels=labels, groups=groups), candidate)
    assert one.low == one.value == one.high == pytest.approx(0.25)


def test_two_flipped_rows_are_allowed_on_the_golden_set_and_no_more() -> None:
    allowed = allowance("accuracy", golden_loss=0.0, max_drop=0.02, rows=20)
    assert allowed == pytest.approx(0.02 + 2 / 20)
    assert 2 / 20 < allowed < 3 / 20


def test_the_same_answers_pass() -> None:
    result = judge(spec(), "cpu-int8", golden(), {"y": golden()["output.y"]})
    assert (result.passed, result.loss, result.allowed, result.metric) == (True, 0.0, 0.1, "accuracy")


def test_a_collapsed_model_is_refused() -> None:
    constant = np.tile(np.array([[0.0, 1.0]], np.float32), (10, 1))
    result = judge(spec(), "cpu-int8", golden(), {"y": constant})
    assert not result.passed
    assert result.loss == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        ({}, "missing"),
        ({"y": np.zeros((10, 3), np.float32)}, "shape"),
        ({"y": np.zeros((9, 2), np.float32)}, "shape"),
        ({"y": np.full((10, 2), np.nan, np.float32)}, "finite"),
        ({"y": np.full((10, 2), np.inf, np.float32)}, "finite"),
        ({"y": np.full((10, 2), b"x", object)}, "finite"),
    ],
)
def test_outputs_that_cannot_be_compared_fail(outputs: dict[str, Array], problem: str) -> None:
    result = judge(spec(allowed=1.0), "cpu-int8", golden(), outputs)
    assert not result.passed
    assert problem in result.problem


def test_a_variant_without_an_allowance_is_an_error() -> None:
    with pytest.raises(BundleError, match="trt-int8"):
        judge(spec(), "trt-int8", golden(), {"y": golden()["output.y"]})


def test_the_gate_needs_neither_onnx_nor_torch() -> None:
    heavy = "{'torch', 'onnx', 'onnxruntime'} & set(sys.modules)"
    code = f"import sys, hardware.gate; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("metric", ["expected_accuracy", "cosine"])
def test_a_loss_that_cannot_be_computed_never_passes(metric: str) -> None:
    outputs = np.array([[9.0, 0.0], [np.nan, 1.0]], np.float32)
    value = loss(Reference(metric=metric, outputs=outputs), np.ones((2, 2), np.float32))  # type: ignore[arg-type]
    assert not value <= 0.02
