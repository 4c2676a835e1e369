import io
import random
import resource
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from common.errors import InvalidInput
from common.images import ImagePipeline, decode, prepare, to_pixels

PIPELINE = ImagePipeline(resize=256, crop=224)


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def gradient(width: int, height: int) -> Image.Image:
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, (x + y) / 2], axis=-1).astype(np.uint8))


def test_the_centre_is_what_a_resize_and_a_crop_give() -> None:
    image = gradient(400, 300)
    resized = image.resize((341, 256), Image.Resampling.BICUBIC)
    left, top = (341 - 224) // 2, (256 - 224) // 2
    expected = np.asarray(resized.crop((left, top, left + 224, top + 224)), dtype=np.int32)
    assert np.abs(to_pixels(image, PIPELINE).astype(np.int32) - expected).max() <= 2


@pytest.mark.parametrize("size", [(20_000, 1), (1, 20_000), (3, 5), (1, 1)])
def test_an_odd_shape_costs_no_more_memory_than_any_other(size: tuple[int, int]) -> None:
    data = encoded(Image.new("RGB", size, (10, 20, 30)))
    assert prepare(data, PIPELINE).shape == (1, 3, 224, 224)
    code = (
        "import resource, sys; from common.images import ImagePipeline, prepare;"
        "limit = 1 << 30; resource.setrlimit(resource.RLIMIT_AS, (limit, limit));"
        "prepare(bytes.fromhex(sys.stdin.read()), ImagePipeline(resize=256, crop=224))"
    )
    subprocess.run([sys.executable, "-c", code], input=data.hex(), text=True, check=True, timeout=60)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's about damaged EXIF blocks
def test_damaged_files_are_answers_or_invalid_input_never_anything_else() -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"
    rng = random.Random(7)
    sources = [
        encoded(gradient(40, 30), "JPEG", exif=exif),
        encoded(gradient(40, 30)),
        encoded(gradient(9, 9), exif=exif),
    ]
    refused = 0
    for number in range(3000):
        data = bytearray(sources[number % len(sources)])
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            assert prepare(bytes(data), PIPELINE).shape == (1, 3, 224, 224)
        except InvalidInput:
            refused += 1
    assert 100 < refused < 3000


def test_grey_and_transparent_pictures_become_the_declared_channels() -> None:
    assert decode(encoded(Image.new("LA", (8, 8))), PIPELINE).mode == "RGB"
    grey = ImagePipeline(resize=8, crop=8, channels="L", mean=(0.5,), std=(0.5,))
    assert prepare(encoded(Image.new("RGBA", (8, 8))), grey).shape == (1, 1, 8, 8)
