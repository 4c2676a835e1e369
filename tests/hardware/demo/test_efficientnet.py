"""Photos, labels and weights of EfficientNet-Lite0; and what is built of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.bundle import Bundle
from common.images import prepare as encoded_to_input
from common.tensorfile import read_tensors
from hardware.build.data import load_rows
from hardware.build.report import read_report
from hardware.build.session import Session
from hardware.build.spec import ModelSpec, load_spec
from hardware.demo import photos as demo_photos
from hardware.demo.efficientnet import LABELS, factory, parameters
from hardware.demo.prepare import prepare
from tests.conftest import Built


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes, with two crops of each photo instead of dozens."""
    out = tmp_path_factory.mktemp("efficientnet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_photos, "CALIBRATION_CROPS", 2)
        patch.setattr(demo_photos, "HELDOUT_CROPS", 2)
        prepare("efficientnet-lite0", out, progress=lambda line: None)
    return out


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return load_spec(folder / "model.toml")


def test_no_photo_gives_crops_to_both_sides() -> None:
    split = demo_photos.split()
    assert not set(split.calibration) & set(split.heldout)
    assert len(split.heldout) >= 10
    assert demo_photos.HELDOUT_CROPS >= 12
    assert len(split.calibration) * demo_photos.CALIBRATION_CROPS >= 500


def test_two_views_of_one_scene_stand_on_the_same_side() -> None:
    split = demo_photos.split()
    pair = {"skimage/data/motorcycle_left.png", "skimage/data/motorcycle_right.png"}
    assert pair <= set(split.calibration) or pair <= set(split.heldout)


@pytest.mark.parametrize("name", [*demo_photos.split().calibration, *demo_photos.split().heldout])
def test_every_photo_is_in_its_wheel(name: str) -> None:
    assert demo_photos.photo_path(name).is_file()


def test_crops_are_repeatable_and_differ(spec: ModelSpec) -> None:
    assert spec.image is not None
    first = demo_photos.crops("skimage/data/coffee.png", 3, spec.image)
    assert first.shape == (3, 224, 224, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(first, demo_photos.crops("skimage/data/coffee.png", 3, spec.image))
    assert len({crop.tobytes() for crop in first}) == 3


def test_there_are_a_thousand_different_labels() -> None:
    labels = LABELS.read_text(encoding="utf-8").splitlines()
    assert len(labels) == len(set(labels)) == 1000
    known = {0: "tench", 281: "tabby cat", 388: "giant panda", 504: "coffee mug", 657: "missile", 999: "toilet tissue"}
    assert {index: labels[index] for index in known} == known


@pytest.mark.parametrize(
    ("photo", "accepted"),
    [
        ("chelsea.png", {"tabby cat", "tiger cat", "Egyptian cat"}),
        ("coffee.png", {"espresso", "cup"}),
        ("rocket.jpg", {"missile", "projectile"}),
    ],
)
def test_a_photo_gets_the_label_a_person_would_give(
    folder: Path, spec: ModelSpec, photo: str, accepted: set[str]
) -> None:
    assert spec.image is not None
    module = factory()
    module.load_state_dict({name: torch.from_numpy(array) for name, array in parameters().items()}, strict=True)
    pixels = encoded_to_input((folder / "photos" / photo).read_bytes(), spec.image)
    with torch.inference_mode():
        answer = int(module.eval()(torch.from_numpy(pixels)).argmax())
    assert LABELS.read_text(encoding="utf-8").splitlines()[answer] in accepted


def test_the_pipeline_is_the_lite_models_own(spec: ModelSpec) -> None:
    assert spec.image is not None
    assert (spec.image.resize, spec.image.crop, spec.image.interpolation) == (256, 224, "bicubic")
    np.testing.assert_allclose(np.multiply(spec.image.mean, 255), 127)
    np.testing.assert_allclose(np.multiply(spec.image.std, 255), 128)


def test_held_out_rows_are_grouped_by_photo(folder: Path) -> None:
    heldout = read_tensors(folder / "heldout.safetensors")
    assert heldout["groups"].tolist() == [photo for photo in range(len(demo_photos.split().heldout)) for _ in range(2)]
    assert heldout["image"].shape[1:] == (224, 224, 3)


def test_int8_holds_the_gate_measured_anew_from_the_bundle(photos: Built) -> None:
    bundle, spec = Bundle.open(photos.bundle), load_spec(photos.source / "model.toml")
    _, heldout = load_rows(spec, photos.source)
    assert heldout.groups is not None
    assert len(set(heldout.groups.tolist())) >= 10
    fp32, int8 = (
        Session(bundle.file(name)).run_rows(heldout)["logits"] for name in ("full/model.onnx", "cpu-int8/model.onnx")
    )
    # expected accuracy under FP32's posterior, in plain numpy
    posterior = np.exp(fp32 - fp32.max(axis=1, keepdims=True))
    posterior /= posterior.sum(axis=1, keepdims=True)
    rows = np.arange(len(fp32))
    loss = 1 - posterior[rows, int8.argmax(axis=1)].mean() / posterior[rows, fp32.argmax(axis=1)].mean()
    assert loss <= 0.02
    assert loss == pytest.approx(read_report(photos.bundle).variant("cpu-int8").loss.value, abs=0.005)


def test_the_bundle_is_small_and_complete(photos: Built) -> None:
    bundle, report = Bundle.open(photos.bundle), read_report(photos.bundle)
    assert report.variant("cpu-int8").float_share < 0.06
    assert bundle.file("cpu-int8/model.onnx").stat().st_size < 5.2e6
    assert bundle.file("trt-int8/model.onnx").stat().st_size < 5.2e6
    assert bundle.file("golden.safetensors").stat().st_size < 3.3e6
    assert len(bundle.labels()) == 1000
    assert bundle.golden()["input.image"].dtype == np.uint8
