"""Calibration and held-out rows: shapes, pixels, and that no row is on both sides."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from common.errors import BuildError, CalibrationMissing
from common.images import ImagePipeline
from common.tensorfile import write_tensors
from common.tensors import Array, TensorSpec
from hardware.build.data import load_rows
from hardware.build.spec import Calibration, Holdout, ModelSpec, Source

SPEC = ModelSpec(
    name="m",
    task="classification",
    source=Source(onnx="m.onnx"),
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 2)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 3)),),
    calibration=Calibration(file="calib.safetensors"),
    holdout=Holdout(file="held.safetensors"),
)


def rows(count: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((count, 2)).astype(np.float32)


def write(folder: Path, calibration: dict[str, Array], heldout: dict[str, Array]) -> None:
    write_tensors(folder / "calib.safetensors", calibration)
    write_tensors(folder / "held.safetensors", heldout)


def test_a_row_on_both_sides_is_refused(tmp_path: Path) -> None:
    heldout = rows(4, seed=1)
    heldout[2] = rows(8, seed=0)[5]
    write(tmp_path, {"x": rows(8, seed=0)}, {"x": heldout})
    with pytest.raises(BuildError, match=r"1 held-out rows .* row 2"):
        load_rows(SPEC, tmp_path)


def test_no_calibration_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"x": rows(8, seed=0)}, {"x": rows(4, seed=1)})
    with pytest.raises(CalibrationMissing):
        load_rows(dataclasses.replace(SPEC, calibration=None), tmp_path)


@pytest.mark.parametrize(
    ("heldout", "problem"),
    [
        ({"z": rows(4, seed=1)}, "do not match"),
        ({"x": rows(4, seed=1), "extra": rows(4, seed=1)}, "do not match"),
        ({"x": rows(4, seed=1).astype(np.float64)}, "FP64"),
        ({"x": np.zeros((4, 3), np.float32)}, r"\[4, 3\]"),
        ({"x": rows(4, seed=1), "labels": np.zeros(3, np.int64)}, "rows"),
        ({"x": np.zeros((0, 2), np.float32)}, "rows"),
        ({"x": np.array([[1, 2], [np.nan, 1]], np.float32)}, "row 1 of 'x' is not finite"),
        ({"x": rows(4, seed=1), "labels": np.full(4, 99)}, "labels reach from 99 to 99; accepted: 0..2"),
        ({"x": rows(4, seed=1), "labels": np.zeros((4, 3), np.int64)}, r"'labels' is int64 \[4, 3\]"),
        ({"x": rows(4, seed=1), "groups": np.zeros(4, np.float32)}, "'groups' is float32"),
    ],
)
def test_arrays_that_do_not_fit_the_model_are_refused(tmp_path: Path, heldout: dict[str, Array], problem: str) -> None:
    write(tmp_path, {"x": rows(8, seed=0)}, heldout)
    with pytest.raises(BuildError, match=problem):
        load_rows(SPEC, tmp_path)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    write_tensors(tmp_path / "calib.safetensors", {"x": rows(8, seed=0)})
    with pytest.raises(BuildError, match=r"held\.safetensors"):
        load_rows(SPEC, tmp_path)


def test_pixels_become_the_models_input(tmp_path: Path) -> None:
    spec = dataclasses.replace(
        SPEC,
        inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 3, 2, 2)),),
        image=ImagePipeline(resize=2, crop=2, mean=(0.5,) * 3, std=(0.25,) * 3),
    )
    pixels = np.zeros((2, 2, 2, 3), np.uint8)
    pixels[0, 0, 1, 2] = 255
    write(tmp_path, {"x": pixels}, {"x": pixels + 1})
    calibration, _ = load_rows(spec, tmp_path)
    (feeds,) = calibration.feeds(8)
    assert feeds["x"].shape == (2, 3, 2, 2)
    assert feeds["x"][0, 2, 0, 1] == pytest.approx((1 - 0.5) / 0.25)
    assert feeds["x"][0, 0, 0, 0] == pytest.approx((0 - 0.5) / 0.25)


def test_pictures_of_another_size_are_refused(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, image=ImagePipeline(resize=4, crop=4))
    write(tmp_path, {"x": np.zeros((2, 2, 2, 3), np.uint8)}, {"x": np.ones((2, 4, 4, 3), np.uint8)})
    with pytest.raises(BuildError, match="uint8 pixels after crop"):
        load_rows(spec, tmp_path)
