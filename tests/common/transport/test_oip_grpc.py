"""The gRPC form: round trips between our two sides, and hostile bytes."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common.errors import EngineError, InvalidInput
from common.request import Context, Reason, Request, Response, Stamp
from common.serving.catalog import ModelMetadata, ModelState, ModelStatus
from common.tensors import TensorSpec, datatype_of
from common.transport import oip_grpc
from common.transport.headers import read_stamp, write_stamp
from common.transport.proto import oip_pb2 as pb

arrays = st.sampled_from(["?", "u1", "<u2", "<u4", "<u8", "i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8"]).flatmap(
    lambda kind: hnp.arrays(np.dtype(kind), hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
) | hnp.arrays(object, hnp.array_shapes(max_dims=3, max_side=3), elements=st.binary(max_size=8), fill=st.nothing())
names = st.text(min_size=1, max_size=8)
parameters = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return (
        a.shape == b.shape and datatype_of(a) == datatype_of(b) and a.tobytes() == b.tobytes()
    ) or a.tolist() == b.tolist()


@given(
    st.dictionaries(names, arrays, min_size=1, max_size=3),
    st.lists(names, unique=True, max_size=2),
    parameters,
    st.booleans(),
)
def test_request_round_trip(
    inputs: dict[str, np.ndarray], outputs: list[str], values: dict[str, int], is_classified: bool
) -> None:
    classes = 3 if is_classified and len(outputs) < 2 else 0
    request = Request(
        model="m", inputs=inputs, outputs=tuple(outputs), parameters=values, classes=classes, context=Context(pin="2")
    )
    wire = oip_grpc.write_request(request).SerializeToString()
    message = pb.ModelInferRequest.FromString(wire)
    body = oip_grpc.parse_infer(message)
    back = body.request(message.model_name, Context())
    assert (message.model_version, body.id) == ("2", request.context.id)
    assert (back.outputs, back.classes, dict(back.parameters)) == (request.outputs, classes, values)
    assert list(back.inputs) == list(inputs)
    assert all(same(back.inputs[name], inputs[name]) for name in inputs)


@given(st.dictionaries(names, arrays, max_size=3))
def test_response_round_trip(outputs: dict[str, np.ndarray]) -> None:
    stamp = Stamp(target="cloud", model="m", version="4", by="worker-1", reason=Reason.OVERLOAD)
    wire = oip_grpc.render_infer(Response(outputs=outputs, stamp=stamp), "id").SerializeToString()
    back = oip_grpc.read_response(pb.ModelInferResponse.FromString(wire), stamp)
    assert list(back.outputs) == list(outputs)
    assert all(same(back.outputs[name], outputs[name]) for name in outputs)


@given(names, names, st.text(max_size=8), st.sampled_from([None, *Reason]))
def test_stamp_round_trip_through_ascii_headers(model: str, version: str, by: str, reason: Reason | None) -> None:
    stamp = Stamp(target="edge", model=model, version=version, by=by, reason=reason)
    headers = write_stamp(stamp)
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    assert ("x-outrider-reason" in headers) == (reason is not None)
    assert read_stamp(headers, "", "") == stamp


VALID = oip_grpc.write_request(
    Request(
        model="m",
        inputs={"x": np.ones((2, 2), dtype=np.float32), "t": np.array([b"hi"], dtype=object)},
        parameters={"timeout": 5},
        classes=2,
    )
).SerializeToString()


@given(st.integers(0, len(VALID)), st.integers(0, 8), st.binary(max_size=6))
def test_a_mutated_message_is_parsed_or_refused(at: int, cut: int, new: bytes) -> None:
    try:
        message = pb.ModelInferRequest.FromString(VALID[:at] + new + VALID[at + cut :])
    except DecodeError:
        return
    try:
        oip_grpc.parse_infer(message)
    except InvalidInput:
        return


def test_malformed_answer_is_the_peers_fault() -> None:
    message = pb.ModelInferResponse(raw_output_contents=[b"abc"])
    message.outputs.add(name="y", datatype="FP32", shape=[1])
    with pytest.raises(EngineError, match="worker-1 is malformed"):
        oip_grpc.read_response(message, Stamp(target="cloud", model="m", version="1", by="worker-1"))


def test_metadata_round_trip() -> None:
    spec = TensorSpec(name="x", datatype="FP32", shape=(-1, 3, 8, 8))
    metadata = ModelMetadata(
        name="m", versions=("1", "2"), platform="torch_full", inputs=(spec,), outputs=(spec,), max_batch=4
    )
    assert oip_grpc.read_metadata(oip_grpc.render_metadata(metadata)) == metadata


def test_index_round_trip_and_foreign_states() -> None:
    index = [ModelStatus(name="m", version="1", state=s, reason="r") for s in ModelState]
    assert oip_grpc.read_index(oip_grpc.render_index(index)) == index
    foreign = pb.RepositoryIndexResponse()
    foreign.models.add(name="m", state="LOADING")
    assert oip_grpc.read_index(foreign)[0].state is ModelState.UNAVAILABLE
