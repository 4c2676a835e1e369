"""Bad input at every border: the protocol's own status, a message that helps, and a process that goes on.

Node, gateway and worker run once for all of it; after each bad call a good one is answered exactly at the same door.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from common.errors import DeadlineExceeded, InvalidInput, InvalidRequest, NotFound
from common.request import Privacy
from common.transport.proto import oip_pb2 as pb
from tests.doors import JSON_X, Doors, GrpcDoor, HttpDoor, X, open_doors, request
from tests.hostile import picture, png_bomb

DOORS = ("node", "node uds", "gateway", "worker")
SIZE = "Inference-Header-Content-Length"


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with open_doors(tmp_path_factory.mktemp("doors")) as opened:
        yield opened


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def http(door: str, doors: Doors) -> HttpDoor:
    return doors.http[door]


@pytest.fixture
def grpc(door: str, doors: Doors) -> GrpcDoor:
    return doors.grpc[door]


def tensor(**changes: Any) -> dict[str, Any]:
    return {"inputs": [JSON_X | changes]}


def binary(**changes: Any) -> dict[str, Any]:
    one = {name: value for name, value in JSON_X.items() if name != "data"}
    return {"inputs": [one | {"parameters": {"binary_data_size": 16}} | changes]}


def test_http_json(http: HttpDoor) -> None:
    for message, says in (
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [JSON_X, JSON_X]}, "named twice"),
        ({"inputs": [JSON_X, JSON_X | {"name": "z"}]}, "no input 'z'"),
        (tensor(name="y"), "accepted: x FP32 [-1, 2]"),
        (tensor(shape=[-1, 2]), "integers >= 0"),
        (tensor(shape=[0, 2], data=[]), "no rows"),
        (tensor(shape=[2**63, 2]), "elements"),
        (tensor(shape=[2**33, 2**33]), "elements"),
        (tensor(shape=[0, 2**62, 2**62], data=[]), "elements"),
        (tensor(shape=[1.5, 2]), "integers >= 0"),
        (tensor(shape=["2", 2]), "integers >= 0"),
        (tensor(shape=None), "a list of integers"),
        (tensor(shape=[4]), "x FP32 [-1, 2]"),
        (tensor(shape=[1, 4]), "x FP32 [-1, 2]"),
        (tensor(datatype="FP99"), "BOOL, UINT8"),
        (tensor(datatype="INT32", data=[1, 2, 3, 4]), "accepted: FP32"),
        (tensor(data=[1, 2, 3]), "4 values"),
        (tensor(data=[1, 2, 3, 4, 5]), "4 values"),
        (tensor(data=[1, 2, 3, math.nan]), "JSON"),
        (tensor(data=[1, 2, 3, 1e39]), "range of FP32"),
        (tensor(data=[1, 2, 3, None]), "numbers"),
        ({"inputs": [JSON_X], "outputs": [{"name": "z"}]}, "accepted: logits"),
    ):
        said = http.infer(message)
        assert (said.status, says in said.text) == (400, True), (message, said)
        assert "internal" not in said.text
    for model, says in (("nothing", "known"), ("linear/versions/9", "version")):
        said = http.infer(tensor(), model)
        assert (said.status, says in said.text) == (404, True), said
    http.check()


def test_http_binary_tensors(http: HttpDoor) -> None:
    tail = X.tobytes()
    for head, data, length, says in (
        (binary(), tail, "-1", SIZE),
        (binary(), tail, "0", SIZE),
        (binary(), tail, "1e2", SIZE),
        (binary(), tail, "x", SIZE),
        (binary(), tail, "99999", SIZE),
        (binary(), tail, "9" * 30, SIZE),
        (binary(), tail, "7", "not JSON"),
        (binary(), tail[:-1], None, "15 bytes of binary data are left"),
        (binary(), tail + b"x", None, "no input claims"),
        (binary(parameters={"binary_data_size": 15}), tail, None, "16 bytes for FP32"),
        (binary(parameters={"binary_data_size": -1}), tail, None, "an integer, 0 to 16"),
        (binary(parameters={"binary_data_size": 2**64}), tail, None, "an integer, 0 to 16"),
        (binary(parameters={"binary_data_size": "16"}), tail, None, "an integer, 0 to 16"),
        (binary(parameters={"binary_data_size": True}), tail, None, "an integer, 0 to 16"),
        (binary(data=[1]), tail, None, "one of them"),
        (binary(shape=[2**33, 2**33]), tail, None, "elements"),
        (binary(shape=[-2, -2]), tail, None, "integers >= 0"),
        (binary(datatype="FP64", shape=[1, 2]), tail, None, "accepted: FP32"),
    ):
        said = http.binary(head, data, length=length)
        assert (said.status, says in said.text) == (400, True), (head, length, said)
    said = http.infer(binary())  # without the header
    assert (said.status, SIZE in said.text) == (400, True), said
    http.check()


@pytest.mark.parametrize(
    ("datatype", "raw", "says"),
    [
        ("BYTES", b"\xff\xff\xff\xff" + b"a" * 6, "says 4294967295 bytes"),
        ("BYTES", b"\x01\x00\x00\x00a", "at least 8 bytes"),
        ("BYTES", b"\x01\x00\x00\x00a\x02\x00\x00\x00b", "says 2 bytes, 1 are left"),
        ("BYTES", b"\x00\x00\x00\x00" * 3, "after the last"),
        ("BYTES", b"\x01\x00\x00\x00\xff\x00\x00\x00\x00", "UTF-8"),
        ("BOOL", b"\x00\x02", "0 and 1"),
        ("FP16", b"\x00" * 3, "4 bytes for FP16"),
        ("BF16", b"\x00" * 3, "4 bytes for BF16"),
        ("BF16", b"\x00" * 4, "accepted: FP32"),
    ],
)
def test_raw_data_that_lies(http: HttpDoor, grpc: GrpcDoor, datatype: str, raw: bytes, says: str) -> None:
    model = "same-fp32" if datatype == "BF16" else f"same-{datatype.lower()}"
    one = {"name": "x", "datatype": datatype, "shape": [1, 2], "parameters": {"binary_data_size": len(raw)}}
    said = http.binary({"inputs": [one]}, raw, model)
    assert (said.status, says in said.text) == (400, True), said
    message = pb.ModelInferRequest(model_name=model, raw_input_contents=[raw])
    message.inputs.add(name="x", datatype=datatype, shape=[1, 2])
    said = grpc.infer(message)
    assert (said.status, says in said.text) == ("INVALID_ARGUMENT", True), said
    http.check()
    grpc.check()


def changed(change: Callable[[pb.ModelInferRequest], object], *, is_raw: bool) -> pb.ModelInferRequest:
    message = request(is_raw=is_raw)
    change(message)
    return message


def _shape(*dims: int) -> Callable[[pb.ModelInferRequest], object]:
    return lambda message: (message.inputs[0].ClearField("shape"), message.inputs[0].shape.extend(dims))


EITHER_FORM: tuple[tuple[Callable[[pb.ModelInferRequest], object], str], ...] = (
    (lambda m: setattr(m.inputs[0], "name", "y"), "accepted: x FP32 [-1, 2]"),
    (lambda m: setattr(m.inputs[0], "name", ""), "no name"),
    (lambda m: setattr(m.inputs[0], "datatype", "FP99"), "BOOL, UINT8"),
    (lambda m: setattr(m.inputs[0], "datatype", "INT32"), "INT32"),
    (_shape(-1, 2), "integers >= 0"),
    (_shape(0, 2), ""),
    (_shape(2**33, 2**33), "elements"),
    (_shape(2**63 - 1, 2), "elements"),
    (_shape(3, 2), ""),
    (_shape(4), "x FP32 [-1, 2]"),
    (lambda m: m.outputs.add(name="z"), "accepted: logits"),
    (lambda m: m.parameters["priority"].MergeFrom(pb.InferParameter(int64_param=9)), "priority"),
    (lambda m: m.parameters["x"].SetInParent(), "has no value"),
)


@pytest.mark.parametrize("is_raw", [True, False], ids=["raw_input_contents", "contents"])
def test_grpc_messages(grpc: GrpcDoor, is_raw: bool) -> None:
    for change, says in EITHER_FORM:
        said = grpc.infer(changed(change, is_raw=is_raw))
        assert (said.status, says in said.text, bool(said.text)) == ("INVALID_ARGUMENT", True, True), said
    for field, value in (("model_name", "nothing"), ("model_version", "9")):
        said = grpc.infer(changed(lambda m, field=field, value=value: setattr(m, field, value), is_raw=is_raw))
        assert (said.status, "known" in said.text or "version" in said.text) == ("NOT_FOUND", True), said
    grpc.check()


def test_grpc_contents_and_buffers_that_do_not_belong(grpc: GrpcDoor) -> None:
    twice = request()
    twice.inputs.add().CopyFrom(twice.inputs[0])
    twice.raw_input_contents.append(X.tobytes())
    both, short, wrong = request(), request(), request(is_raw=False)
    both.inputs[0].contents.fp32_contents.append(1)
    short.raw_input_contents[0] = b"x" * 15
    wrong.inputs[0].contents.int64_contents.append(1)
    half = request(is_raw=False)
    half.inputs[0].contents.fp32_contents.pop()
    more = request()
    more.raw_input_contents.append(b"")
    big = pb.ModelInferRequest(model_name="same-int8")
    big.inputs.add(name="x", datatype="INT8", shape=[1, 2]).contents.int_contents.extend((1, 128))
    for message, says in (
        (twice, "named twice"),
        (both, "one of them"),
        (short, "16 bytes for FP32"),
        (wrong, "given for FP32"),
        (half, "4 values"),
        (more, "one per input"),
        (big, "range of INT8"),
        (b"\xff\xff\xff", "protobuf"),
        (b"", "inputs"),
    ):
        said = grpc.infer(message)
        assert said.status in ("INVALID_ARGUMENT", "NOT_FOUND"), said
        assert says in said.text, said
    assert grpc.call("NoSuchMethod", b"").status == "UNIMPLEMENTED"
    grpc.check()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("FP32", [math.nan, -math.inf]),
        ("FP64", [math.inf, 5e-324]),
        ("FP16", [math.nan, 65504]),
        ("BOOL", [True, False]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("UINT64", [0, 2**64 - 1]),
        ("BYTES", [b"", "é\0".encode()]),
    ],
)
def test_extreme_values_pass_exactly_in_binary_and_as_valid_json(
    http: HttpDoor, grpc: GrpcDoor, kind: str, values: list[Any]
) -> None:
    if kind == "BYTES":
        raw = b"".join(struct.pack("<I", len(value)) + value for value in values)
    else:
        raw = np.array(
            [values], {"FP32": "f4", "FP64": "f8", "FP16": "f2", "BOOL": "?"}.get(kind, kind.lower())
        ).tobytes()
    model = f"same-{kind.lower()}"
    one = {"name": "x", "datatype": kind, "shape": [1, 2], "parameters": {"binary_data_size": len(raw)}}
    said = http.binary({"inputs": [one], "parameters": {"binary_data_output": True}}, raw, model)
    assert said.status == 200, said
    assert said.body[int(said.headers[SIZE.lower()]) :] == raw
    [output] = http.binary({"inputs": [one]}, raw, model).json()["outputs"]
    text = [value.decode() if isinstance(value, bytes) else value for value in values]
    assert output["data"] == [None if isinstance(v, float) and not math.isfinite(v) else v for v in text]
    message = pb.ModelInferRequest(model_name=model, raw_input_contents=[raw])
    message.inputs.add(name="x", datatype=kind, shape=[1, 2])
    said = grpc.infer(message)
    assert said.status == "OK", said
    assert pb.ModelInferResponse.FromString(said.body).raw_output_contents[0] == raw


def test_headers_that_are_no_text_are_answered(http: HttpDoor) -> None:
    for name, value, status in (
        ("x-outrider-pin", "\xff\xfe", 400),
        ("x-outrider-priority", "\xff", 400),
        ("x-outrider-privacy", "\xff", 400),
        ("x-outrider-deadline-ms", "\xff", 400),
        ("x-outrider-request-id", "\xff", 400),
        ("Expect", "\xff", 417),
        ("Expect", "200-ok", 417),
    ):
        said = http.infer(tensor(), **{name: value})
        assert (said.status, bool(said.text)) == (status, True), (name, said)
    for path, status in (("/v2/models/%ff%00/infer", 404), ("/v2/nothing", 404), ("/v2/models/../infer", 404)):
        assert http.send(path, b"{}").status in (status, 400)
    assert http.send("/v2/models/linear/infer", method="DELETE").status == 405
    http.check()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty picture"),
        (b"GIF89a", "JPEG or PNG"),
        (picture("PNG")[:60], "JPEG or PNG"),
        (picture("JPEG", size=(64, 64))[:200], "JPEG or PNG"),
        (picture("BMP"), "JPEG or PNG"),
        (picture("GIF"), "JPEG or PNG"),
        (png_bomb(60_000, 60), ""),
        (png_bomb(20_000, 20_000), "at most 50000000 pixels"),
        (png_bomb(20_000, 3_000), "at most 50000000 pixels"),
    ],
    ids=["empty", "header", "cut png", "cut jpeg", "bmp", "gif", "wide", "bomb", "large"],
)
def test_pictures(http: HttpDoor, data: bytes, says: str) -> None:
    said = http.send("/v2/models/pictures/classify", data, {"Content-Type": "image/png"})
    assert (said.status, says in said.text) == (400 if says else 200, True), said
    assert (
        http.send("/v2/models/pictures/classify?top=1", picture("JPEG"), {"Content-Type": "image/jpeg"}).status == 200
    )


def test_a_picture_of_100_mb_is_refused_and_a_body_over_the_limit_is_413(doors: Doors) -> None:
    door = doors.http["node"]
    said = door.send("/v2/models/pictures/classify", picture("JPEG") + bytes(100 << 20), {"Content-Type": "image/jpeg"})
    assert said.status in (200, 400), said  # a JPEG ends where it says so: what follows is not its matter
    said = door.send(
        "/v2/models/pictures/classify", b"\x89PNG\r\n\x1a\n" + bytes(100 << 20), {"Content-Type": "image/png"}
    )
    assert (said.status, "picture" in said.text) == (400, True), said
    said = door.send("/v2/models/pictures/classify", bytes((128 << 20) + 1), {"Content-Type": "image/png"})
    assert (said.status, "larger than" in said.text) == (413, True), said
    door.check()


def test_forms_with_broken_headers_are_400(http: HttpDoor) -> None:
    for form in (
        b"--b\r\n\xf7\n\r\n\r\nx\r\n--b--",
        b"--b\r\nContent-Length: x\r\n\r\nx\r\n--b--",
        b"--b\r\n" + b"a" * 9000,
        b"\x00",
    ):
        said = http.send("/v2/models/pictures/classify", form, {"Content-Type": "multipart/form-data; boundary=b"})
        assert (said.status, "form" in said.text) == (400, True), said
    for kind in (
        "multipart/form-data",
        "multipart/form-data; bound\xff=b",
        "multipart/form-data; boundary=" + "b" * 99,
    ):
        said = http.send("/v2/models/pictures/classify", b"--b--", {"Content-Type": kind})
        assert (said.status, "form" in said.text) == (400, True), said
    http.check()


@pytest.mark.parametrize(
    ("model", "inputs", "options", "says"),
    [
        (3, {"x": X}, {}, "model"),
        ("\ud800", {"x": X}, {}, "Unicode"),
        ("linear", None, {}, "a mapping"),
        ("linear", [X], {}, "a mapping"),
        ("linear", {}, {}, "at least one input"),
        ("linear", {1: X}, {}, "a string"),
        ("linear", {"x": [[1], [1, 2]]}, {}, "no array"),
        ("linear", {"x": None}, {}, "objects"),
        ("linear", {"x": X * 1j}, {}, "complex64"),
        ("linear", {"x": np.float32(1)}, {}, "no rows"),
        ("linear", {"x": X[:0]}, {}, "no rows"),
        ("linear", {"x": X.astype(np.float64)}, {}, "FP32"),
        ("same-bytes", {"x": np.array([["\ud800", "a"]], object)}, {}, "Unicode"),
        ("same-bytes", {"x": np.array([[b"\xff", "a"]], object)}, {}, "UTF-8"),
        ("linear", {"x": X}, {"timeout_s": math.nan}, "timeout_s"),
        ("linear", {"x": X}, {"timeout_s": "1"}, "timeout_s"),
        ("linear", {"x": X}, {"classes": 1.5}, "classes"),
        ("linear", {"x": X}, {"classes": -1}, "classes"),
        ("linear", {"x": X}, {"classes": True}, "classes"),
        ("linear", {"x": X}, {"outputs": "logits"}, "a tuple of output names"),
        ("linear", {"x": X}, {"outputs": 3}, "a tuple of output names"),
        ("linear", {"x": X}, {"outputs": ("logits", "logits")}, "each name once"),
        ("linear", {"x": X}, {"priority": 9}, "Priority.REALTIME"),
        ("linear", {"x": X}, {"privacy": None}, "Privacy.DEVICE_ONLY"),
        ("linear", {"x": X}, {"privacy": "secret"}, "Privacy.DEVICE_ONLY"),
        ("linear", {"x": X}, {"pin": 1}, "pin"),
        ("linear", {"x": X}, {"parameters": {"a": [1]}}, "parameters"),
        ("linear", {"x": X}, {"parameters": {"a": 2**70}}, "64 bits"),
    ],
)
def test_in_process(doors: Doors, model: Any, inputs: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        doors.wait(doors.node.infer(model, inputs, **options))
    assert says in str(caught.value)


def test_in_process_statuses_and_the_node_goes_on(doors: Doors) -> None:
    for error, model, options in (
        (NotFound, "nothing", {}),
        (NotFound, "linear", {"pin": "9"}),
        (DeadlineExceeded, "linear", {"timeout_s": -1.0}),
        (InvalidInput, "linear", {"privacy": ""}),
    ):
        with pytest.raises(error):
            doors.wait(doors.node.infer(model, {"x": X}, **options))
    answer = doors.wait(doors.node.infer("linear", {"x": X}, privacy="device_only"))  # a word is as good as the enum
    assert answer.stamp.target == "edge"
    assert Privacy("device_only") is Privacy.DEVICE_ONLY
    assert doors.wait(doors.node.infer("linear", {"x": X}, pin="1")).stamp.version == "1"
