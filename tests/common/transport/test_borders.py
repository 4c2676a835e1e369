"""Laws at the border: what is packed comes back, both forms say the same, and no bytes do more than be refused."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.http import InferenceServerClient, InferInput, InferResult

from common.errors import InvalidInput
from common.request import Response, Stamp
from common.tensors import DATATYPES, as_tensor, datatype_of, dtype_of, element_count, narrowed, pack, unpack, widened
from common.transport import headers, oip, oip_grpc, oip_json
from common.transport.proto import oip_pb2 as pb

fixed = settings(derandomize=True, deadline=None, max_examples=60)
STAMP = Stamp(target="edge", model="m", version="1")
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Any array of any datatype, every bit pattern of it."""
    kind = draw(st.sampled_from(DATATYPES))
    shape = draw(SHAPES)
    if kind == "BYTES":
        return draw(hnp.arrays(object, shape, elements=st.binary(max_size=6), fill=st.nothing()))
    if kind == "BOOL":
        return draw(hnp.arrays(bool, shape))
    dtype = dtype_of(kind, "x")
    raw = draw(hnp.arrays("u1", math.prod(shape) * dtype.itemsize, fill=st.nothing()))
    return raw.view(dtype).reshape(shape)


@fixed
@given(arrays())
def test_what_is_packed_comes_back_bit_for_bit(array: np.ndarray) -> None:
    back = unpack(pack(array), datatype_of(array), array.shape, "x")
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert pack(back) == pack(array)


@fixed
@given(st.binary(max_size=40), st.sampled_from(DATATYPES), st.lists(st.integers(-2, 5) | st.just(2**62), max_size=4))
def test_any_bytes_are_a_tensor_or_invalid_input(data: bytes, datatype: str, shape: list[int]) -> None:
    with contextlib.suppress(InvalidInput):
        array = oip.tensor_from_raw(data, datatype, oip.checked_shape(shape, "s"), "x")
        assert array.size == math.prod(shape)
        assert pack(array) == data


@fixed
@given(st.lists(st.integers() | st.booleans() | st.floats() | st.none() | st.text(max_size=2), max_size=5))
@example([2**63, 1])
@example([2**33, 2**33])
@example([0, 2**63])
def test_a_shape_is_counted_as_arithmetic_has_it_or_refused(shape: list[Any]) -> None:
    with contextlib.suppress(InvalidInput):
        count = element_count(tuple(shape), "x")
        assert all(type(size) is int and size >= 0 for size in shape)
        assert count == math.prod(shape)


@fixed
@given(arrays().filter(lambda a: a.dtype.kind in "buif" and a.dtype.itemsize and np.isfinite(a.astype(float)).all()))
def test_json_and_binary_say_the_same(array: np.ndarray) -> None:
    one = {"name": "x", "datatype": datatype_of(array), "shape": list(array.shape)}
    text = json.dumps({"inputs": [one | {"data": array.ravel().tolist()}]}).encode()
    head = json.dumps({"inputs": [one | {"parameters": {"binary_data_size": len(pack(array))}}]}).encode()
    spoken = oip_json.parse_infer(text).inputs["x"]
    binary = oip_json.parse_infer(head + pack(array), str(len(head))).inputs["x"]
    np.testing.assert_array_equal(spoken, binary)
    assert spoken.dtype == binary.dtype


HEAD = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}]}
).encode()
trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["inputs", "name", "shape", "datatype", "data", "parameters", "outputs", "id"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@fixed
@given(
    st.binary(max_size=60)
    | trees.map(lambda tree: json.dumps(tree).encode())
    | st.binary(max_size=9).map(HEAD.__add__),
    st.none() | st.integers(-9, 200).map(str) | st.text(max_size=5) | st.just(str(len(HEAD))),
)
@example(HEAD + b"abcd", "²")
@example(HEAD + b"abcd", str(len(HEAD)) + "\n")
@example(b'{"id": "' + b"\\ud800" + b'"}', None)
@example(b'{"a":' * 2000 + b"1" + b"}" * 2000, None)
def test_any_http_body_is_a_call_or_invalid_input(data: bytes, size: str | None) -> None:
    with contextlib.suppress(InvalidInput):
        oip_json.parse_infer(data, size)


@fixed
@given(st.binary(max_size=80))
def test_any_grpc_message_is_a_call_or_invalid_input(data: bytes) -> None:
    with contextlib.suppress(InvalidInput):
        oip_grpc.parse_infer(oip_grpc.parse_message(pb.ModelInferRequest, data))


NAMES = [
    value
    for name, value in vars(headers).items()
    if name.isupper() and isinstance(value, str) and not name.startswith("_")
]


@fixed
@given(
    st.dictionaries(st.sampled_from(NAMES), st.text(max_size=12) | st.integers().map(str), max_size=4),
    st.dictionaries(
        st.sampled_from(["priority", "timeout"]), st.integers() | st.booleans() | st.floats() | st.text(), max_size=2
    ),
)
@example({"x-outrider-pin": "\udcff"}, {})
@example({"x-outrider-deadline-ms": "1\n"}, {})
@example({"x-outrider-deadline-ms": "9" * 15}, {"timeout": 2**63})
def test_any_headers_are_a_context_or_invalid_input(fields: dict[str, str], parameters: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidInput):
        context = headers.read_context(fields, headers.Said(parameters=parameters), 100.0)
        assert context.deadline >= 100.0
        assert all(value.isascii() for value in headers.write_context(context, 100.0).values())


# --- BF16, which numpy has not ---

floats = st.floats(width=32) | st.integers(0, 2**32 - 1).map(lambda bits: float(np.uint32(bits).view(np.float32)))


@fixed
@given(st.lists(floats, min_size=1, max_size=5))
def test_bf16_is_rounded_as_torch_does_it(values: list[float]) -> None:
    array = np.array(values, np.float32)
    wanted = torch.from_numpy(array).to(torch.bfloat16)
    np.testing.assert_array_equal(widened(narrowed(array)), wanted.to(torch.float32).numpy())


def test_every_bf16_passes_the_stock_client_exactly() -> None:
    bits = np.arange(1 << 16, dtype="<u2")
    one = InferInput("x", [1 << 16], "BF16").set_data_from_numpy(bits.view(ml_dtypes.bfloat16))
    data, size = InferenceServerClient.generate_request_body([one])
    parsed = oip_json.parse_infer(data, str(size)).inputs["x"]
    assert datatype_of(parsed) == "BF16"
    np.testing.assert_array_equal(widened(parsed), bits.view(ml_dtypes.bfloat16).astype(np.float32))
    asked = oip.Body(inputs={}, binary={"y": True})
    answer, fields = oip_json.render_infer(Response(outputs={"y": parsed}, stamp=STAMP), asked)
    result = InferResult.from_response_body(answer, header_length=int(fields[oip_json.HEADER_LENGTH]))
    assert result.as_numpy("y").tobytes() == bits.tobytes()


def test_bf16_in_json_is_its_value_and_no_finite_number_is_null() -> None:
    values = [1.0, -0.0, 3.389531389251535e38, float("nan"), float("inf"), 2.0**-133]
    outputs = {"y": narrowed(np.array(values, np.float32))}
    answer, _ = oip_json.render_infer(Response(outputs=outputs, stamp=STAMP), oip.Body(inputs={}))
    got = json.loads(answer)["outputs"][0]
    assert (got["datatype"], got["data"][3:5]) == ("BF16", [None, None])
    exact = [values[i] for i in (0, 1, 2, 5)]
    np.testing.assert_array_equal(
        np.array([got["data"][i] for i in (0, 1, 2, 5)], np.float32), np.array(exact, np.float32)
    )
    tensor = {"name": "x", "datatype": "BF16", "shape": [3], "data": [1, 0.1, -2.5]}
    parsed = oip_json.parse_infer(json.dumps({"inputs": [tensor]}).encode()).inputs["x"]
    assert widened(parsed).tolist() == [1.0, 0.10009765625, -2.5]  # 0.1 as bfloat16: 0x3DCD


def test_bf16_of_a_library_that_has_one_is_taken_as_such() -> None:
    array = as_tensor(np.array([[1.0, 2.5]], ml_dtypes.bfloat16), "x")
    assert (datatype_of(array), widened(array).tolist()) == ("BF16", [[1.0, 2.5]])
