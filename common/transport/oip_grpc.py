"""Open Inference Protocol v2 over gRPC: messages to and from domain types, for the server and for our own client.

Pure. Data comes in as typed `contents` or as `raw_input_contents` (one kind for the whole request) and goes out raw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from common.errors import EngineError, InvalidInput
from common.request import Parameter, Request, Response, Stamp
from common.serving.catalog import ModelMetadata, ModelState, ModelStatus
from common.tensors import BYTES, Array, TensorSpec, check_bytes_count, datatype_of, dtype_of, pack
from common.transport import oip, oip_config
from common.transport.headers import write_stamp
from common.transport.proto import oip_pb2 as pb
from common.transport.sizes import check_message_size

SERVICE = "inference.GRPCInferenceService"

_CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
_FIELDS = tuple(field.name for field in pb.InferTensorContents.DESCRIPTOR.fields)


def parse_message(kind: Any, data: bytes) -> Any:
    """A message of the class `kind`. Raises `InvalidInput` for bytes that are none, or too many."""
    check_message_size(kind.DESCRIPTOR.name, data)
    try:
        return kind.FromString(data)
    except DecodeError as exc:
        raise InvalidInput("message", f"not a {kind.DESCRIPTOR.name}", "a protobuf message of the protocol") from exc


def parse_infer(message: pb.ModelInferRequest) -> oip.Body:
    """An infer request. Raises `InvalidInput` saying where."""
    parameters = _parameters(message.parameters, "parameters")
    classes: dict[str, int] = {}
    oip.check_count(len(message.outputs), "outputs")
    for i, output in enumerate(message.outputs):
        where = f"outputs[{i}]"
        name = oip.checked_name(output.name, f"{where}.name", classes)
        own = _parameters(output.parameters, f"{where}.parameters")
        if "shared_memory_region" in own:
            raise InvalidInput(f"{where}.parameters.shared_memory_region", "shared memory is not served", "none")
        classes[name] = oip.checked_classes(own.get(oip.CLASSIFICATION, 0), f"{where}.parameters.{oip.CLASSIFICATION}")
    asked = oip.checked_classes(parameters.get(oip.CLASSIFICATION, 0), f"parameters.{oip.CLASSIFICATION}")
    return oip.Body(
        id=message.id,
        inputs=_tensors(message.inputs, message.raw_input_contents, "input"),
        outputs=tuple(classes),
        classes=oip.one_classified(classes, asked),
        parameters=parameters,
    )


def render_infer(response: Response, request_id: str) -> pb.ModelInferResponse:
    stamp = response.stamp
    message = pb.ModelInferResponse(model_name=stamp.model, model_version=stamp.version, id=request_id)
    _write_parameters(message.parameters, write_stamp(stamp))
    for name, array in response.outputs.items():
        message.outputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        message.raw_output_contents.append(pack(array))
    return message


def write_request(request: Request) -> pb.ModelInferRequest:
    """A request for the next process. Its context travels in metadata, but for the pinned version."""
    context = request.context
    message = pb.ModelInferRequest(model_name=request.model, model_version=context.pin or "", id=context.id)
    _write_parameters(message.parameters, request.parameters)
    for name, array in request.inputs.items():
        message.inputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        message.raw_input_contents.append(pack(array))
    for name in request.outputs:
        message.outputs.add(name=name)
    if request.classes:
        place = message.outputs[0] if len(message.outputs) == 1 else message
        place.parameters[oip.CLASSIFICATION].int64_param = request.classes
    return message


def read_response(message: pb.ModelInferResponse, stamp: Stamp) -> Response:
    """A peer's answer. Raises `EngineError` where it is not well formed: that is no fault of the caller."""
    try:
        outputs = _tensors(message.outputs, message.raw_output_contents, "output")
    except InvalidInput as exc:
        raise EngineError(stamp.model, f"the answer of {stamp.by} is malformed: {exc}") from exc
    return Response(outputs=outputs, stamp=stamp)


def render_metadata(metadata: ModelMetadata) -> pb.ModelMetadataResponse:
    message = pb.ModelMetadataResponse(name=metadata.name, versions=metadata.versions, platform=metadata.platform)
    for specs, field in ((metadata.inputs, message.inputs), (metadata.outputs, message.outputs)):
        for spec in specs:
            field.add(name=spec.name, datatype=spec.datatype, shape=spec.shape)
    if metadata.max_batch:
        message.parameters[oip_config.MAX_BATCH].int64_param = metadata.max_batch
    return message


def read_metadata(message: pb.ModelMetadataResponse) -> ModelMetadata:
    def specs(tensors: Iterable[Any]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name=t.name, datatype=t.datatype, shape=tuple(t.shape)) for t in tensors)

    return ModelMetadata(
        name=message.name,
        versions=tuple(message.versions),
        platform=message.platform,
        inputs=specs(message.inputs),
        outputs=specs(message.outputs),
        max_batch=_max_batch(message),
    )


def render_config(metadata: ModelMetadata) -> pb.ModelConfigResponse:
    return pb.ModelConfigResponse(config=pb.ModelConfig(**oip_config.render(metadata)))


def render_statistics(entries: Iterable[Mapping[str, Any]]) -> pb.ModelStatisticsResponse:
    return pb.ModelStatisticsResponse(model_stats=[pb.ModelStatistics(**entry) for entry in entries])


def render_stream(answer: pb.ModelInferResponse) -> pb.ModelStreamInferResponse:
    """The one answer to a request of a stream: it says that it is the last for that request, as Triton does."""
    answer.parameters["triton_final_response"].bool_param = True
    return pb.ModelStreamInferResponse(infer_response=answer)


def render_stream_error(text: str, request_id: str) -> pb.ModelStreamInferResponse:
    """The one answer to a request of a stream that failed. Its id says which one that was; empty: it was no request."""
    reply = render_stream(pb.ModelInferResponse(id=request_id))
    reply.error_message = text
    return reply


def render_index(index: Iterable[ModelStatus]) -> pb.RepositoryIndexResponse:
    message = pb.RepositoryIndexResponse()
    for m in index:
        message.models.add(name=m.name, version=m.version, state=m.state.value, reason=m.reason)
    return message


def read_index(message: pb.RepositoryIndexResponse) -> list[ModelStatus]:
    """A peer's index; a state that we do not know (LOADING, UNLOADING, ...) counts as UNAVAILABLE."""
    states = {state.value: state for state in ModelState}
    return [
        ModelStatus(name=m.name, version=m.version, state=states.get(m.state, ModelState.UNAVAILABLE), reason=m.reason)
        for m in message.models
    ]


def _max_batch(message: pb.ModelMetadataResponse) -> int:
    said = message.parameters.get(oip_config.MAX_BATCH)
    return int(said.int64_param) if said is not None else 0


def _tensors(tensors: Any, raw: Any, kind: str) -> dict[str, Array]:
    """The named arrays of a message; `kind` is input or output."""
    oip.check_count(len(tensors), f"{kind}s")
    if raw and len(raw) != len(tensors):
        raise InvalidInput(f"raw_{kind}_contents", f"{len(raw)} buffers for {len(tensors)} {kind}s", f"one per {kind}")
    arrays: dict[str, Array] = {}
    for i, tensor in enumerate(tensors):
        where = f"{kind}s[{i}]"
        name = oip.checked_name(tensor.name, f"{where}.name", arrays)
        dtype_of(tensor.datatype, f"{where}.datatype")
        shape = oip.checked_shape(tensor.shape, f"{where}.shape")
        if "shared_memory_region" in tensor.parameters:
            raise InvalidInput(f"{where}.parameters.shared_memory_region", "shared memory is not served", "data")
        if not raw:
            arrays[name] = _from_contents(tensor.contents, tensor.datatype, shape, f"{where}.contents")
        elif tensor.HasField("contents"):
            raise InvalidInput(f"{where}.contents", f"given beside raw_{kind}_contents", "one of them")
        else:
            arrays[name] = oip.tensor_from_raw(raw[i], tensor.datatype, shape, f"raw_{kind}_contents[{i}]")
    return arrays


def _from_contents(contents: Any, datatype: str, shape: tuple[int, ...], where: str) -> Array:
    expected = _CONTENTS.get(datatype)
    if expected is None:
        raise InvalidInput(where, f"{datatype} has no typed contents", "raw contents")
    for name in _FIELDS:
        if name != expected and len(getattr(contents, name)):
            raise InvalidInput(f"{where}.{name}", f"given for {datatype}", expected)
    values = getattr(contents, expected)
    count = int(np.prod(shape, dtype=np.int64))
    if len(values) != count:
        raise InvalidInput(
            f"{where}.{expected}", f"{len(values)} values", f"{count} values for the shape {list(shape)}"
        )
    if datatype == BYTES:
        check_bytes_count(count, f"{where}.{expected}")
    try:
        array = np.empty(count, dtype=dtype_of(datatype, where))
        array[:] = values
    except OverflowError:
        raise InvalidInput(
            f"{where}.{expected}", f"a number that {datatype} cannot hold", f"the range of {datatype}"
        ) from None
    return array.reshape(shape)


def _parameters(parameters: Mapping[str, Any], where: str) -> dict[str, Parameter]:
    values: dict[str, Parameter] = {}
    oip.check_count(len(parameters), where)
    for name, choice in parameters.items():
        kind = choice.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidInput(f"{where}.{name}", "has no value", "a boolean, number or string")
        values[name] = getattr(choice, kind)
    return values


def _write_parameters(target: Any, values: Mapping[str, Parameter]) -> None:
    for name, value in values.items():
        match value:
            case bool():
                target[name].bool_param = value
            case int() if value < 1 << 63:
                target[name].int64_param = value
            case int():
                target[name].uint64_param = value
            case float():
                target[name].double_param = value
            case _:
                target[name].string_param = value
