"""Writes what a user would bring to `outrider model build`: model.toml, a checkpoint, data, labels.

efficientnet-lite0   model.toml checkpoint.safetensors calibration.safetensors heldout.safetensors labels.txt photos/
digits               the same without labels and photos, in one of several stages of training
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from common.images import ImagePipeline
from common.tensorfile import write_tensors
from common.tensors import Array
from hardware.demo import digits, efficientnet, photos

MODELS = ("efficientnet-lite0", "digits")
DEFAULT_STAGE: digits.Stage = "v1"

_PIPELINE = ImagePipeline(resize=256, crop=224, mean=(127 / 255,) * 3, std=(128 / 255,) * 3)

_DIGITS_TRAINED = 1200  # rows of scikit-learn's 1,797; the rest is held out
_DIGITS_CALIBRATION = 512

_EFFICIENTNET_TOML = f"""\
name = "efficientnet-lite0"
task = "classification"
max_batch = 32
labels = "labels.txt"
source = {{ factory = "hardware.demo.efficientnet:factory", checkpoint = "checkpoint.safetensors" }}
inputs = [{{ name = "image", datatype = "FP32", shape = [-1, 3, 224, 224] }}]
outputs = [{{ name = "logits", datatype = "FP32", shape = [-1, 1000] }}]
calibration = {{ file = "calibration.safetensors" }}
holdout = {{ file = "heldout.safetensors" }}

[image]
resize = {_PIPELINE.resize}
crop = {_PIPELINE.crop}
mean = {list(_PIPELINE.mean)}
std = {list(_PIPELINE.std)}
interpolation = "{_PIPELINE.interpolation}"

[gate]
max_drop = 0.02
float_layers = ["/_conv_stem/Conv", "/_blocks.0/_depthwise_conv/Conv", "/_blocks.0/_project_conv/Conv"]
"""

_DIGITS_TOML = """\
name = "digits"
task = "classification"
max_batch = 64
source = { factory = "hardware.demo.digits:factory", checkpoint = "checkpoint.safetensors" }
inputs = [{ name = "pixels", datatype = "FP32", shape = [-1, 1, 8, 8] }]
outputs = [{ name = "logits", datatype = "FP32", shape = [-1, 10] }]
calibration = { file = "calibration.safetensors" }
holdout = { file = "heldout.safetensors" }

[gate]
metric = "accuracy"
max_drop = 0.01
"""


def prepare(model: str, out: Path, *, stage: digits.Stage = DEFAULT_STAGE, progress: Callable[[str], None]) -> None:
    """Fills the folder `out` for one of `MODELS`; `stage` is for ``digits``."""
    if model == "digits":
        _digits({stage: out}, progress)
    else:
        _efficientnet(out, progress)


def prepare_stages(
    model: str, parent: Path, stages: Sequence[digits.Stage], *, progress: Callable[[str], None]
) -> None:
    """Fills ``parent/MODEL-STAGE`` for each stage; of ``digits``, each is trained on from the one before."""
    folders = {stage: parent / f"{model}-{stage}" for stage in stages}
    if model == "digits":
        _digits(folders, progress)
    else:
        for folder in folders.values():
            _efficientnet(folder, progress)


def digits_data() -> tuple[Array, Array]:
    """float32 [1797, 1, 8, 8] in 0..1 and int64 labels, in scikit-learn's order shuffled once."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    return (pixels[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels[order].astype(np.int64)


def _digits(folders: dict[digits.Stage, Path], progress: Callable[[str], None]) -> None:
    pixels, labels = digits_data()
    seen, heldout = slice(0, _DIGITS_TRAINED), slice(_DIGITS_TRAINED, None)
    progress(f"digits: training {', '.join(folders)} on {_DIGITS_TRAINED} images")
    missing = set(folders)
    for stage, checkpoint in digits.stages(pixels[seen], labels[seen]):
        if stage in missing:
            missing.remove(stage)
            out = folders[stage]
            out.mkdir(parents=True, exist_ok=True)
            write_tensors(out / "checkpoint.safetensors", checkpoint)
            write_tensors(out / "calibration.safetensors", {"pixels": pixels[:_DIGITS_CALIBRATION]})
            write_tensors(out / "heldout.safetensors", {"pixels": pixels[heldout], "labels": labels[heldout]})
            (out / "model.toml").write_text(_DIGITS_TOML, encoding="utf-8")
        if not missing:
            return


def _efficientnet(out: Path, progress: Callable[[str], None]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    chosen = photos.split()
    progress(f"efficientnet-lite0: crops of {len(chosen.calibration) + len(chosen.heldout)} photos")
    calibration = [photos.crops(name, photos.CALIBRATION_CROPS, _PIPELINE) for name in chosen.calibration]
    heldout = [photos.crops(name, photos.HELDOUT_CROPS, _PIPELINE) for name in chosen.heldout]
    groups = np.repeat(np.arange(len(heldout), dtype=np.int64), photos.HELDOUT_CROPS)
    write_tensors(out / "calibration.safetensors", {"image": np.concatenate(calibration)})
    write_tensors(out / "heldout.safetensors", {"image": np.concatenate(heldout), "groups": groups})
    write_tensors(out / "checkpoint.safetensors", efficientnet.parameters())
    shutil.copyfile(efficientnet.LABELS, out / "labels.txt")
    (out / "photos").mkdir(exist_ok=True)
    for name in chosen.heldout:
        shutil.copyfile(photos.photo_path(name), out / "photos" / Path(name).name)
    (out / "model.toml").write_text(_EFFICIENTNET_TOML, encoding="utf-8")
