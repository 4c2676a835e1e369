"""The JSON form: laws of the codec, and what is refused with which words."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput, InferResult

from common.errors import EngineError, InvalidInput
from common.request import Context, Response, Stamp
from common.tensors import DATATYPES, datatype_of
from common.transport import oip
from common.transport.oip_json import HEADER_LENGTH, parse_infer, render_infer

STAMP = Stamp(target="edge", model="m", version="1")

numeric = st.sampled_from(["?", "u1", "<u2", "<u4", "<u8", "i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8"]).flatmap(
    lambda kind: hnp.arrays(np.dtype(kind), hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
)
texts = hnp.arrays(object, hnp.array_shapes(max_dims=3, max_side=3), elements=st.binary(max_size=8), fill=st.nothing())


def body(**changes: Any) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4.5]}
    message: dict[str, Any] = {"inputs": [tensor | changes.pop("tensor", {})]}
    return json.dumps(message | changes).encode()


def binary(head: dict[str, Any], tail: bytes) -> tuple[bytes, str]:
    data = json.dumps(head).encode()
    return data + tail, str(len(data))


@given(numeric | texts)
def test_stock_binary_request_arrives_exactly(array: np.ndarray) -> None:
    one = InferInput("x", list(array.shape), datatype_of(array)).set_data_from_numpy(array)
    data, size = InferenceServerClient.generate_request_body([one])
    parsed = parse_infer(data, None if size is None else str(size))
    got = parsed.inputs["x"]
    assert (got.shape, datatype_of(got)) == (array.shape, datatype_of(array))
    assert got.tolist() == array.tolist() or got.tobytes() == array.tobytes()
    assert parsed.parameters == {"binary_data_output": True}


@given(numeric | texts)
def test_binary_answer_is_read_exactly_by_the_stock_client(array: np.ndarray) -> None:
    asked = oip.Body(inputs={}, binary={"y": True}, id="7")
    data, headers = render_infer(Response(outputs={"y": array}, stamp=STAMP), asked)
    result = InferResult.from_response_body(data, header_length=int(headers[HEADER_LENGTH]))
    got = result.as_numpy("y")
    assert got.shape == array.shape
    assert got.tobytes() == array.tobytes() or got.tolist() == array.tolist()
    assert result.get_response()["id"] == "7"


@given(numeric)
def test_json_answer_is_valid_json_with_the_same_values(array: np.ndarray) -> None:
    data, headers = render_infer(Response(outputs={"y": array}, stamp=STAMP), oip.Body(inputs={}))
    assert HEADER_LENGTH not in headers

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    (output,) = json.loads(data, parse_constant=refuse)["outputs"]
    expected = [v if not isinstance(v, float) or math.isfinite(v) else None for v in array.ravel().tolist()]
    got = np.array([v for v in output["data"] if v is not None], dtype=array.dtype)
    assert got.tolist() == [v for v in expected if v is not None]
    assert [v is None for v in output["data"]] == [v is None for v in expected]


@given(numeric, st.booleans())
def test_json_request_arrives_exactly_flat_or_nested(array: np.ndarray, is_nested: bool) -> None:
    values = np.nan_to_num(array, posinf=1, neginf=-1) if array.dtype.kind == "f" else array
    data = values.tolist() if is_nested and values.size else values.ravel().tolist()
    tensor = {"name": "x", "datatype": datatype_of(values), "shape": list(values.shape), "data": data}
    got = parse_infer(json.dumps({"inputs": [tensor]}).encode()).inputs["x"]
    np.testing.assert_array_equal(got, values)
    assert got.dtype == values.dtype


def test_texts_are_bytes() -> None:
    tensor = {"datatype": "BYTES", "shape": [2], "data": ["é", ""]}
    assert parse_infer(body(tensor=tensor)).inputs["x"].tolist() == ["é".encode(), b""]


def test_bytes_that_are_no_text_are_refused_in_json_answers() -> None:
    outputs = {"y": np.array([b"\xff"], dtype=object)}
    with pytest.raises(InvalidInput, match="binary_data"):
        render_infer(Response(outputs=outputs, stamp=STAMP), oip.Body(inputs={}))


def test_each_output_has_its_own_form() -> None:
    outputs = [{"name": "a", "parameters": {"binary_data": True}}, {"name": "b"}]
    asked = parse_infer(body(outputs=outputs, parameters={"binary_data_output": False}))
    assert (asked.outputs, asked.binary) == (("a", "b"), {"a": True, "b": False})
    one = np.ones(1, dtype=np.float32)
    data, headers = render_infer(Response(outputs={"a": one, "b": one}, stamp=STAMP), asked)
    a, b = json.loads(data[: int(headers[HEADER_LENGTH])])["outputs"]
    assert (a["parameters"], b["data"]) == ({"binary_data_size": 4}, [1.0])
    assert data.endswith(one.tobytes())


def test_stock_request_for_classes_is_understood() -> None:
    one = InferInput("x", [1], "FP32").set_data_from_numpy(np.ones(1, dtype=np.float32))
    data, size = InferenceServerClient.generate_request_body([one], outputs=[InferRequestedOutput("p", class_count=3)])
    parsed = parse_infer(data, str(size))
    assert (parsed.outputs, parsed.classes) == (("p",), 3)


def test_parameters_of_the_protocol_do_not_reach_the_model() -> None:
    said = {"priority": 1, "timeout": 5, "binary_data_output": True, "classification": 2, "mine": "x"}
    parsed = parse_infer(body(parameters=said))
    request = parsed.request("m", Context())
    assert (dict(request.parameters), request.classes) == ({"mine": "x"}, 2)


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b"", "inputs"),
        (b"nonsense", "body"),
        (b"[1]", "body"),
        (b'{"inputs": [{"name": "x", "data": [NaN]}]}', "body"),
        (b"[" * 5000, "body"),
        (b'{"inputs": 3}', "inputs"),
        (b'{"inputs": [3]}', "inputs"),
        (body(id=7), "id"),
        (body(parameters=[]), "parameters"),
        (body(parameters={"a": [1]}), "parameters.a"),
        (body(parameters={"classification": -1}), "parameters.classification"),
        (body(parameters={"binary_data_output": 1}), "parameters.binary_data_output"),
        (body(outputs={}), "outputs"),
        (body(outputs=[{}]), "outputs[0].name"),
        (body(outputs=[{"name": "a"}, {"name": "a"}]), "outputs[1].name"),
        (body(outputs=[{"name": "a", "parameters": {"classification": True}}]), "outputs[0].parameters.classification"),
        (
            body(outputs=[{"name": "a", "parameters": {"classification": 2}}, {"name": "b"}]),
            "outputs.a.parameters.classification",
        ),
        (body(tensor={"name": ""}), "inputs[0].name"),
        (body(tensor={"name": 3}), "inputs[0].name"),
        (body(tensor={"datatype": None}), "inputs[0].datatype"),
        (body(tensor={"datatype": ["FP32"]}), "inputs[0].datatype"),
        (body(tensor={"datatype": "BF17"}), "inputs[0].datatype"),
        (body(tensor={"datatype": "BF16", "data": [1, 2, 3, 3.4e38]}), "inputs[0].data"),
        (body(tensor={"datatype": "BF16", "data": [1, 2, 3, True]}), "inputs[0].data"),
        (body(tensor={"shape": None}), "inputs[0].shape"),
        (body(tensor={"shape": "22"}), "inputs[0].shape"),
        (body(tensor={"shape": [2, -1]}), "inputs[0].shape"),
        (body(tensor={"shape": [2, 2.0]}), "inputs[0].shape"),
        (body(tensor={"shape": [True, 4]}), "inputs[0].shape"),
        (body(tensor={"shape": [2**33, 2**33]}), "inputs[0].shape"),
        (body(tensor={"shape": [0, 2**63, 2**63]}), "inputs[0].shape"),
        (body(tensor={"shape": [1] * 33}), "inputs[0].shape"),
        (body(tensor={"data": None}), "inputs[0].data"),
        (body(tensor={"data": "abcd"}), "inputs[0].data"),
        (body(tensor={"data": {"b64": "AAAA"}}), "inputs[0].data"),
        (body(tensor={"data": [1, 2, 3]}), "inputs[0].data"),
        (body(tensor={"data": [1, 2, 3, None]}), "inputs[0].data"),
        (body(tensor={"data": [1, 2, 3, "4"]}), "inputs[0].data"),
        (body(tensor={"data": [1, 2, 3, True]}), "inputs[0].data"),
        (body(tensor={"data": [1, 2, 3, 1e300]}), "inputs[0].data"),
        (body(tensor={"data": [[1, 2], [3]]}), "inputs[0].data"),
        (body(tensor={"data": [[1, 2], 3]}), "inputs[0].data"),
        (body(tensor={"data": [[1, 2], [3, [4]]]}), "inputs[0].data"),
        (body(tensor={"datatype": "INT8", "data": [1, 2, 3, 128]}), "inputs[0].data"),
        (body(tensor={"datatype": "UINT64", "data": [1, 2, 3, -1]}), "inputs[0].data"),
        (body(tensor={"datatype": "INT32"}), "inputs[0].data"),
        (body(tensor={"datatype": "BOOL"}), "inputs[0].data"),
        (body(tensor={"datatype": "BYTES"}), "inputs[0].data"),
        (body(tensor={"parameters": 5}), "inputs[0].parameters"),
        (body(tensor={"parameters": {"shared_memory_region": "r"}}), "inputs[0].parameters.shared_memory_region"),
        (body(tensor={"parameters": {"binary_data_size": 4}}), "inputs[0].data"),
    ],
)
def test_bad_json_is_refused_saying_where(data: bytes, where: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_infer(data)
    assert caught.value.where == where


HEAD = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}]}


@pytest.mark.parametrize("length", ["-1", "0", "+5", " 5", "1_0", "999999", "abc", "", "9" * 40, "٣"])
def test_bad_header_length_is_refused(length: str) -> None:
    data, _ = binary(HEAD, bytes(4))
    with pytest.raises(InvalidInput) as caught:
        parse_infer(data, length)
    assert caught.value.where == HEADER_LENGTH


def test_binary_data_without_header_length_is_refused() -> None:
    with pytest.raises(InvalidInput, match=HEADER_LENGTH):
        parse_infer(json.dumps(HEAD).encode())


@pytest.mark.parametrize(
    ("size", "tail", "where"),
    [
        (4, b"", "inputs[0].parameters.binary_data_size"),
        (-4, bytes(4), "inputs[0].parameters.binary_data_size"),
        (4.0, bytes(4), "inputs[0].parameters.binary_data_size"),
        (True, bytes(4), "inputs[0].parameters.binary_data_size"),
        (3, bytes(4), "inputs[0].data"),
        (4, bytes(5), "body"),
    ],
)
def test_bad_binary_size_is_refused(size: Any, tail: bytes, where: str) -> None:
    tensor = HEAD["inputs"][0] | {"parameters": {"binary_data_size": size}}
    with pytest.raises(InvalidInput) as caught:
        parse_infer(*binary({"inputs": [tensor]}, tail))
    assert caught.value.where == where


def test_boolean_bytes_are_zero_or_one() -> None:
    tensor = {"name": "x", "datatype": "BOOL", "shape": [2], "parameters": {"binary_data_size": 2}}
    with pytest.raises(InvalidInput, match="0 and 1"):
        parse_infer(*binary({"inputs": [tensor]}, b"\x01\x02"))


VALID, VALID_LENGTH = binary(
    {
        "id": "a",
        "inputs": [
            HEAD["inputs"][0],
            {"name": "t", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 6}},
            {"name": "d", "datatype": "INT8", "shape": [2], "data": [[1, 2]]},
        ],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        "parameters": {"timeout": 4},
    },
    bytes(4) + b"\x02\0\0\0hi",
)
words = st.sampled_from([b"null", b"-1", b"1e308", b"[]", b"{}", b'"', b"true", b"\xff", b"9" * 30, b"FP64"])


@given(st.integers(0, len(VALID)), st.integers(0, 12), st.binary(max_size=6) | words, st.booleans())
def test_a_mutated_request_is_parsed_or_refused(at: int, cut: int, new: bytes, is_length_kept: bool) -> None:
    data = VALID[:at] + new + VALID[at + cut :]
    length = int(VALID_LENGTH) + (0 if is_length_kept else len(new) - min(cut, len(VALID) - at))
    try:
        parsed = parse_infer(data, str(length))
    except InvalidInput:
        return
    for array in parsed.inputs.values():
        assert datatype_of(array) in DATATYPES


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "data", "b64"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(["name", "datatype", "shape", "data", "parameters"]), json_values)
def test_any_value_in_any_place_is_parsed_or_refused(key: str, value: Any) -> None:
    with contextlib.suppress(InvalidInput):
        parse_infer(body(tensor={key: value}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"0.5:3:tabby cat", (0.5, 3, "tabby cat")),
        ("0.25:1", (0.25, 1, "")),
        (b"1:0:a:b", (1.0, 0, "a:b")),
        (b"0.1:2:\xc3\xa9", (0.1, 2, "é")),
    ],
)
def test_class_text_is_value_index_label(text: bytes | str, expected: tuple[float, int, str]) -> None:
    one = oip.parse_class(text, "m")
    assert (one.probability, one.index, one.label) == expected


@pytest.mark.parametrize("text", [b"", b"a:b", b"0.5", b"0.5:x"])
def test_other_text_is_no_class(text: bytes) -> None:
    with pytest.raises(EngineError):
        oip.parse_class(text, "m")
