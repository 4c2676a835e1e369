"""Photos that the wheels of scikit-image and scikit-learn carry, cut into crops: calibration and held-out rows.

``photos.json`` fixes which photo serves which side, so no photo gives crops to both; two views of one scene stand on
the same side. A crop is a random part of the photo put through the model's own pipeline, sometimes mirrored, darker or
brighter: photos as different people would frame them.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.images import ImagePipeline, decode, to_pixels
from common.tensors import Array

SPLIT = Path(__file__).with_name("photos.json")
CALIBRATION_CROPS = 42
HELDOUT_CROPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Photo files as ``package/path``."""

    calibration: tuple[str, ...]
    heldout: tuple[str, ...]


def split() -> Split:
    data = json.loads(SPLIT.read_text(encoding="utf-8"))
    return Split(calibration=tuple(data["calibration"]), heldout=tuple(data["heldout"]))


def photo_path(name: str) -> Path:
    """Where the file lies; its package is located, not imported."""
    package, _, inside = name.partition("/")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"package {package!r} with the photo {name!r} is not installed")
    return Path(found.submodule_search_locations[0]) / inside


def crops(name: str, count: int, pipeline: ImagePipeline) -> Array:
    """uint8 [count, crop, crop, channels]; a photo always gives the same ones."""
    image = decode(photo_path(name).read_bytes(), pipeline, name)
    random = np.random.default_rng(list(name.encode()))
    made = []
    for _ in range(count):
        side = min(image.size) * random.uniform(0.45, 1.0)
        left, top = random.uniform(0, image.width - side), random.uniform(0, image.height - side)
        box = tuple(round(edge) for edge in (left, top, left + side, top + side))
        pixels = to_pixels(image.crop(box), pipeline)  # type: ignore[arg-type]
        if random.random() < 0.5:
            pixels = pixels[:, ::-1]
        made.append(np.clip(pixels * random.uniform(0.7, 1.3), 0, 255).astype(np.uint8))
    return np.stack(made)
