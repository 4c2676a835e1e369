import dataclasses
import io

import numpy as np
import pytest
from msgspec import structs
from PIL import Image

from common.bundle import ModelConfig
from common.errors import InvalidInput, OutsideProfile
from common.images import ImagePipeline
from common.request import Request
from common.serving.prepare import answer_tensors, check, engine_inputs, has_pictures, posterior, rows_of
from common.serving.slot import LoadedEngine
from common.tensors import TensorSpec
from tests.fakes import FakeEngine, config

PIPELINE = ImagePipeline(resize=4, crop=4, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
PICTURES = ModelConfig(
    name="pictures",
    task="classification",
    inputs=(TensorSpec(name="pixels", datatype="FP32", shape=(-1, 3, 4, 4)),),
    outputs=(TensorSpec(name="logits", datatype="FP32", shape=(-1, 3)),),
    max_batch=4,
    image=PIPELINE,
)


def request(**inputs: np.ndarray) -> Request:
    return Request(model="m", inputs=inputs)


def x(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def picture(color: tuple[int, int, int], size: tuple[int, int] = (8, 8), form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, form)
    return buffer.getvalue()


def pictures(*data: bytes) -> np.ndarray:
    out = np.empty(len(data), dtype=object)
    out[:] = data
    return out


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({}, "the request has none"),
        ({"y": x(1, 2)}, "no input 'y'; accepted: x FP32"),
        ({"x": x(1, 2), "y": x(1, 2)}, "no input 'y'"),
        ({"x": x(1, 2, dtype=np.float64)}, r"datatype: FP64; accepted: FP32"),
        ({"x": x(2)}, r"shape: \[2\]"),
        ({"x": x(0, 2)}, "no rows"),
        ({"x": np.float32(1.0).reshape(())}, "no rows"),
        ({"x": x(1, 2), "z": x(2, 2)}, "2 rows where another input has 1"),
    ],
)
def test_what_is_wrong_for_any_target_names_the_place_and_what_is_right(
    inputs: dict[str, np.ndarray], says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        check(request(**inputs), config())


@pytest.mark.parametrize("shape", [(9, 2), (1, 3)])
def test_what_a_larger_target_might_take_is_outside_the_profile(shape: tuple[int, ...]) -> None:
    with pytest.raises(OutsideProfile, match="accepted"):
        check(request(x=x(*shape)), config(max_batch=8))


def test_a_request_at_the_limit_is_inside() -> None:
    check(request(x=x(8, 2)), config(max_batch=8))
    assert rows_of(request(x=x(8, 2))) == 8


def test_an_unknown_output_or_classes_of_a_model_without_classes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no output 'z'; accepted: y"):
        check(structs.replace(request(x=x(1, 2)), outputs=("z",)), config())
    with pytest.raises(InvalidInput, match="classification"):
        check(structs.replace(request(x=x(1, 2)), classes=1), config())


@pytest.mark.parametrize("name", ["image", "pixels"])
def test_pictures_become_the_declared_tensor(name: str) -> None:
    asked = request(**{name: pictures(picture((255, 0, 127)), picture((0, 0, 0), (16, 9), "JPEG"))})
    check(asked, PICTURES)
    assert has_pictures(asked, PICTURES)
    tensor = engine_inputs(asked, PICTURES)["pixels"]
    assert (tensor.shape, tensor.dtype) == ((2, 3, 4, 4), np.float32)
    # by hand: (255/255 - .5) / .25 = 2, (0 - .5) / .25 = -2, (127/255 - .5) / .25 = -.00784
    np.testing.assert_allclose(tensor[0, :, 1, 1], [2.0, -2.0, -0.0078431], atol=1e-6)
    np.testing.assert_allclose(tensor[1], np.full((3, 4, 4), -2.0), atol=0.02)


def test_an_image_model_still_takes_its_tensor() -> None:
    asked = request(pixels=x(2, 3, 4, 4))
    check(asked, PICTURES)
    assert not has_pictures(asked, PICTURES)
    assert engine_inputs(asked, PICTURES) is asked.inputs


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty picture"),
        (b"GIF89a not allowed", "not a picture"),
        (picture((1, 2, 3), form="JPEG")[:-40], "broken"),
    ],
)
def test_a_picture_that_cannot_be_decoded_says_which_one(data: bytes, says: str) -> None:
    asked = request(image=pictures(picture((0, 0, 0)), data))
    with pytest.raises(InvalidInput, match=rf"inputs\['image'\]\[1\].*{says}"):
        engine_inputs(asked, PICTURES)


def test_a_picture_with_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    small = dataclasses.replace(PICTURES, image=dataclasses.replace(PIPELINE, max_pixels=63))
    with pytest.raises(InvalidInput, match="8x8 pixels; accepted: at most 63"):
        engine_inputs(request(image=pictures(picture((0, 0, 0)))), small)


def test_a_picture_turned_by_its_camera_is_set_upright() -> None:
    image = Image.new("RGB", (8, 8), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 8, 4))  # white above
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    tensor = engine_inputs(request(image=pictures(buffer.getvalue())), PICTURES)["pixels"]
    assert tensor[0, 0, 0, 0] == -2.0  # black above now
    assert tensor[0, 0, 3, 0] == 2.0


def test_the_best_classes_come_as_value_index_label() -> None:
    engine = LoadedEngine(
        engine=FakeEngine(), config=PICTURES, version="1", labels=("cat", "dog", "owl"), latency=FakeEngine().warm()
    )
    logits = np.log(np.array([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]], np.float32))
    asked = structs.replace(request(image=pictures(b"")), classes=2)
    answer = answer_tensors({"logits": logits}, asked, engine)["logits"]
    assert answer.tolist() == [[b"0.700000:1:dog", b"0.200000:2:owl"], [b"0.500000:0:cat", b"0.300000:2:owl"]]


def test_a_posterior_declared_as_it_is_stays_as_it_is() -> None:
    scores = np.array([[0.25, 0.75]], np.float32)
    np.testing.assert_array_equal(posterior(scores, dataclasses.replace(PICTURES, posterior="identity")), scores)
    np.testing.assert_allclose(posterior(np.array([[1000.0, 1000.0]]), PICTURES), [[0.5, 0.5]])


def test_only_requested_outputs_are_answered_in_the_order_asked() -> None:
    two = dataclasses.replace(
        config(), outputs=(*config().outputs, TensorSpec(name="z", datatype="FP32", shape=(-1, 1)))
    )
    engine = LoadedEngine(engine=FakeEngine(), config=two, version="1", labels=(), latency=FakeEngine().warm())
    outputs = {"y": x(1, 2), "z": x(1, 1)}
    assert list(answer_tensors(outputs, request(x=x(1, 2)), engine)) == ["y", "z"]
    assert list(answer_tensors(outputs, structs.replace(request(x=x(1, 2)), outputs=("z",)), engine)) == ["z"]
