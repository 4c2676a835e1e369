"""The declared preprocessing of image models: encoded picture -> pixels -> the model's input tensor.

The same functions serve calibration, the golden gate and live requests, so that they cannot differ. The only importer
of Pillow.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from common.errors import InvalidInput
from common.tensors import Array

_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_FORMATS = ("JPEG", "PNG")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePipeline:
    """Resize the shorter side, crop the centre, scale to ``(pixel / 255 - mean) / std``, lay out as NCHW or NHWC."""

    resize: int  # 1..8192: pixels of the shorter side, before the crop
    crop: int  # 1..8192: pixels of the square that is cut from the centre; at most resize
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # one per channel, of pixels scaled to 0..1
    std: tuple[float, ...] = (0.229, 0.224, 0.225)  # one per channel, above 0
    channels: Literal["RGB", "L"] = "RGB"  # colour, or grey
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"  # of the resize
    layout: Literal["NCHW", "NHWC"] = "NCHW"  # of the model's input
    max_pixels: int = 50_000_000  # larger pictures are refused before they are decoded

    def __post_init__(self) -> None:
        if not 1 <= self.crop <= self.resize <= 8192:
            raise ValueError(f"1 <= crop <= resize <= 8192 does not hold for crop {self.crop}, resize {self.resize}")
        planes = 3 if self.channels == "RGB" else 1
        if len(self.mean) != planes or len(self.std) != planes or not all(s > 0 for s in self.std):
            raise ValueError(f"mean and std need {planes} values each for {self.channels}, std above 0")


def decode(data: bytes, pipeline: ImagePipeline, where: str = "image") -> Image.Image:
    """A picture in the pipeline's colour space, upright. Raises `InvalidInput` for what is not a whole JPEG or PNG."""
    if not data:
        raise InvalidInput(where, "empty picture", "a JPEG or PNG file")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            if image.width * image.height > pipeline.max_pixels:
                raise InvalidInput(
                    where, f"{image.width}x{image.height} pixels", f"at most {pipeline.max_pixels} pixels"
                )
            if image.format == "JPEG":  # lets libjpeg skip most of the work for large photos
                image.draft(pipeline.channels, (pipeline.resize, pipeline.resize))
            image.load()
            return _upright(image).convert(pipeline.channels)
    except InvalidInput:
        raise
    except UnidentifiedImageError as exc:
        raise InvalidInput(where, "not a picture that can be decoded", "a JPEG or PNG file") from exc
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:  # before the header is ours to read
        raise InvalidInput(where, f"far too large: {exc}", f"at most {pipeline.max_pixels} pixels") from exc
    except (OSError, ValueError, TypeError, SyntaxError, struct.error) as exc:
        raise InvalidInput(where, f"broken picture: {exc}", "a whole JPEG or PNG file") from exc
    except MemoryError as exc:
        raise InvalidInput(where, "needs more memory than there is", "a smaller picture") from exc


def to_pixels(image: Image.Image, pipeline: ImagePipeline) -> Array:
    """uint8 [crop, crop, channels]: the centre of what the picture is with its shorter side at `resize`.

    Only the centre is resampled, so that a picture's shape does not decide how much memory it takes.
    """
    width, height = image.size
    side = min(width, height) * pipeline.crop / pipeline.resize
    left, top = (width - side) / 2, (height - side) / 2
    filter_ = _FILTERS[pipeline.interpolation]
    centre = image.resize((pipeline.crop, pipeline.crop), filter_, box=(left, top, left + side, top + side))
    return np.asarray(centre, dtype=np.uint8).reshape(pipeline.crop, pipeline.crop, -1)


def _upright(image: Image.Image) -> Image.Image:
    """Turned as the camera says; a damaged EXIF block says nothing."""
    try:
        return ImageOps.exif_transpose(image)
    except (OSError, ValueError, TypeError, SyntaxError, KeyError, struct.error):
        return image


def normalize(pixels: Array, pipeline: ImagePipeline) -> Array:
    """uint8 [n, h, w, c] to the model's float32 input, [n, c, h, w] for NCHW."""
    mean = np.asarray(pipeline.mean, dtype=np.float32) * np.float32(255)
    std = np.asarray(pipeline.std, dtype=np.float32) * np.float32(255)
    scaled = (pixels.astype(np.float32) - mean) / std
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2)) if pipeline.layout == "NCHW" else scaled


def prepare(data: bytes, pipeline: ImagePipeline, where: str = "image") -> Array:
    """Encoded picture to one row of the model's input: float32 [1, ...]."""
    return normalize(to_pixels(decode(data, pipeline, where), pipeline)[None], pipeline)
