"""What the quick look accepts, the full check accepts, with the same rows; what it cannot tell, it leaves alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from common.bundle import ModelConfig
from common.errors import OutriderError
from common.request import Request
from common.serving.accepts import Accepts
from common.serving.prepare import check, rows_of
from common.tensors import TensorSpec

MODEL = ModelConfig(
    name="m",
    task="tensor",
    inputs=(
        TensorSpec(name="x", datatype="FP32", shape=(-1, 2)),
        TensorSpec(name="k", datatype="INT64", shape=(-1,)),
    ),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 2)),),
    max_batch=4,
)
GOOD = Request(model="m", inputs={"x": np.zeros((3, 2), np.float32), "k": np.zeros(3, np.int64)})

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
arrays = st.builds(np.zeros, shapes, st.sampled_from([np.float32, np.int64, np.float64, np.dtype(">f4"), object]))
right = st.integers(1, 5).map(lambda rows: {"x": np.zeros((rows, 2), np.float32), "k": np.zeros(rows, np.int64)})
inputs = right | st.dictionaries(st.sampled_from(["x", "k", "z"]), arrays)


def test_a_plain_request_is_accepted_with_its_rows() -> None:
    assert Accepts(MODEL).rows(GOOD) == 3
    assert Accepts(MODEL).rows(structs.replace(GOOD, outputs=("y",))) == 3


@given(inputs, st.sampled_from([(), ("y",), ("y", "z")]), st.integers(0, 1))
def test_it_never_accepts_what_the_check_refuses(
    tensors: dict[str, np.ndarray], outputs: tuple[str, ...], classes: int
) -> None:
    request = Request(model="m", inputs=tensors, outputs=outputs, classes=classes)
    rows = Accepts(MODEL).rows(request)
    try:
        check(request, MODEL)
        expected = rows_of(request)
    except OutriderError:
        expected = 0
    assert rows in (0, expected)


def test_free_dimensions_are_left_to_the_check() -> None:
    free = model_of(TensorSpec(name="x", datatype="FP32", shape=(-1, -1)))
    request = Request(model="m", inputs={"x": np.zeros((1, 7), np.float32)})
    check(request, free)
    assert Accepts(free).rows(request) == 0


def model_of(*specs: TensorSpec) -> ModelConfig:
    return ModelConfig(name="m", task="tensor", inputs=specs, outputs=MODEL.outputs)
