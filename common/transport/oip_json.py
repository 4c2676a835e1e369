"""Open Inference Protocol v2 over HTTP: infer requests and answers as JSON, with the binary tensor extension.

Pure: bytes to `Body`, `Response` to bytes. JSON has no number for NaN and the infinities: they are written as null, and
null is no input; through binary data every value is exact. BYTES are UTF-8 strings in JSON; what is not text travels in
binary.

    request   JSON, or JSON of Inference-Header-Content-Length bytes followed by the inputs' raw data in order
    answer    the same; an output is binary when its `binary_data` or the request's `binary_data_output` asks for it
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import orjson

from common.errors import InvalidInput
from common.request import Parameter, Response
from common.serving.catalog import ModelMetadata, ModelStatus
from common.tensors import BF16, BYTES, Array, check_bytes_count, datatype_of, dtype_of, narrowed, pack, widened
from common.transport import oip
from common.transport.headers import write_stamp
from common.transport.sizes import MAX_PARSED_BYTES, QUICK_BYTES

HEADER_LENGTH = "Inference-Header-Content-Length"

_NUMBERS = frozenset({int, float})
_SCALARS: dict[str, frozenset[type]] = {"b": frozenset({bool}), "f": _NUMBERS, "V": _NUMBERS, "O": frozenset({str})}
_INTEGERS = frozenset({int})
_PARAMETER = (bool, int, float, str)
_SAYS = {"b": "true or false", "f": "numbers", "V": "numbers", "O": "strings"}


def parse_object(data: bytes | memoryview, where: str = "body", *, limit: int = QUICK_BYTES) -> dict[str, Any]:
    """A JSON object; empty data is an empty one. Raises `InvalidInput`."""
    if not len(data):
        return {}
    if len(data) > limit:
        raise InvalidInput(
            where, f"{len(data)} bytes of JSON", f"at most {limit}; large tensors are binary data, not JSON"
        )
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        raise InvalidInput(where, f"not JSON: {exc}", "a JSON object") from None
    if not isinstance(value, dict):
        raise InvalidInput(where, f"JSON of type {type(value).__name__}", "a JSON object")
    return value


def parse_parameters(body: bytes) -> dict[str, Parameter]:
    """The parameters of a call that has nothing else in its body."""
    return _parameters(parse_object(body).get("parameters"), "parameters")


def parse_flag(body: bytes, name: str) -> bool:
    """A flag in the body of a call that has nothing else in it; absent: false. Raises `InvalidInput`."""
    return _flag(parse_object(body).get(name, False), name)


def parse_infer(body: bytes, header_length: str | None = None) -> oip.Body:
    """An infer request. `header_length` is the value of the header of that name. Raises `InvalidInput` saying where."""
    size = _header_size(header_length, len(body))
    view = memoryview(body)
    message = parse_object(view[:size], limit=MAX_PARSED_BYTES)
    raw = _Raw(view[size:], has_header=header_length is not None)
    parameters = _parameters(message.get("parameters"), "parameters")
    inputs: dict[str, Array] = {}
    for i, item in enumerate(_objects(message.get("inputs"), "inputs")):
        where = f"inputs[{i}]"
        name = oip.checked_name(item.get("name"), f"{where}.name", inputs)
        inputs[name] = _input(item, raw, where)
    raw.finish()
    classes, binary = _outputs(message.get("outputs"), parameters)
    asked = oip.checked_classes(parameters.get(oip.CLASSIFICATION, 0), f"parameters.{oip.CLASSIFICATION}")
    return oip.Body(
        id=_text(message.get("id", ""), "id"),
        inputs=inputs,
        outputs=tuple(classes),
        classes=oip.one_classified(classes, asked),
        parameters=parameters,
        binary=binary,
    )


def render_infer(response: Response, body: oip.Body) -> tuple[bytes, dict[str, str]]:
    """The answer's body and the headers that belong to its form (content type, header length)."""
    outputs, tail = [], []
    default = bool(body.parameters.get("binary_data_output", False))
    for i, (name, array) in enumerate(response.outputs.items()):
        out: dict[str, Any] = {"name": name, "datatype": datatype_of(array), "shape": list(array.shape)}
        if body.binary.get(name, default):
            tail.append(pack(array))
            out["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            out["data"] = _json_data(array, f"outputs[{i}].data")
        outputs.append(out)
    stamp = response.stamp
    message = {"model_name": stamp.model, "model_version": stamp.version, "parameters": write_stamp(stamp)}
    head = dump(message | ({"id": body.id} if body.id else {}) | {"outputs": outputs})
    if not tail:
        return head, {"Content-Type": "application/json"}
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(head))}
    return b"".join((head, *tail)), headers


def render_metadata(metadata: ModelMetadata) -> dict[str, Any]:
    def tensors(specs: Any) -> list[dict[str, Any]]:
        return [{"name": s.name, "datatype": s.datatype, "shape": list(s.shape)} for s in specs]

    return {
        "name": metadata.name,
        "versions": list(metadata.versions),
        "platform": metadata.platform,
        "inputs": tensors(metadata.inputs),
        "outputs": tensors(metadata.outputs),
    }


def render_index(index: list[ModelStatus]) -> list[dict[str, str]]:
    return [{"name": m.name, "version": m.version, "state": m.state.value, "reason": m.reason} for m in index]


def dump(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


class _Raw:
    """The binary data behind the JSON header, handed out in the order of the inputs."""

    def __init__(self, data: memoryview, *, has_header: bool) -> None:
        self._data, self._has_header, self._offset = data, has_header, 0

    def take(self, size: object, where: str) -> memoryview:
        if not self._has_header:
            raise InvalidInput(where, f"binary data without the {HEADER_LENGTH} header", "that header")
        left = len(self._data) - self._offset
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= left:
            raise InvalidInput(where, f"{size!r}, and {left} bytes of binary data are left", f"an integer, 0 to {left}")
        self._offset += size
        return self._data[self._offset - size : self._offset]

    def finish(self) -> None:
        if left := len(self._data) - self._offset:
            raise InvalidInput(
                "body", f"{left} bytes of binary data that no input claims", "binary_data_size of each input"
            )


def _header_size(text: str | None, body: int) -> int:
    if text is None:
        return body
    if not (text.isascii() and text.isdigit() and len(text) <= 15 and 0 < int(text) <= body):
        raise InvalidInput(HEADER_LENGTH, f"{text[:40]!r} with a body of {body} bytes", f"an integer, 1 to {body}")
    return int(text)


def _input(item: dict[str, Any], raw: _Raw, where: str) -> Array:
    datatype = item.get("datatype")
    dtype_of(datatype, f"{where}.datatype")  # type: ignore[arg-type]
    shape = item.get("shape")
    if not isinstance(shape, list):
        raise InvalidInput(f"{where}.shape", f"{shape!r}", "a list of integers")
    dims = oip.checked_shape(shape, f"{where}.shape")
    parameters = _parameters(item.get("parameters"), f"{where}.parameters")
    if "shared_memory_region" in parameters:
        raise InvalidInput(
            f"{where}.parameters.shared_memory_region", "shared memory is not served", "data in the body"
        )
    if "binary_data_size" in parameters:
        if "data" in item:
            raise InvalidInput(f"{where}.data", "given beside binary_data_size", "one of them")
        data = raw.take(parameters["binary_data_size"], f"{where}.parameters.binary_data_size")
        return oip.tensor_from_raw(data, str(datatype), dims, f"{where}.data")
    return _from_json(item.get("data"), str(datatype), dims, f"{where}.data")


def _from_json(data: Any, datatype: str, shape: tuple[int, ...], where: str) -> Array:
    flat = _flatten(data, shape, where)
    dtype = dtype_of(datatype, where)
    if wrong := set(map(type, flat)) - _SCALARS.get(dtype.kind, _INTEGERS):
        names = ", ".join(sorted("null" if t is type(None) else t.__name__ for t in wrong))
        raise InvalidInput(where, f"{names} among {datatype} data", _SAYS.get(dtype.kind, "integers"))
    if datatype == BYTES:
        check_bytes_count(len(flat), where)
        array = np.empty(len(flat), dtype=object)
        array[:] = [text.encode() for text in flat]
        return array.reshape(shape)
    try:
        with np.errstate(over="raise"):
            if dtype == BF16:
                return _bf16(flat).reshape(shape)
            return np.array(flat, dtype=dtype).reshape(shape)
    except (OverflowError, FloatingPointError):
        raise InvalidInput(
            where, f"a number that {datatype} cannot hold", f"numbers in the range of {datatype}"
        ) from None


def _bf16(flat: list[Any]) -> Array:
    array = narrowed(np.array(flat, np.float32))
    if np.isinf(widened(array)).any():
        raise OverflowError
    return array


def _flatten(data: Any, shape: tuple[int, ...], where: str) -> list[Any]:
    """Row-major scalars of flat data, or of data nested exactly as the shape says."""
    if not isinstance(data, list):
        raise InvalidInput(where, "missing" if data is None else f"of type {type(data).__name__}", "a list")
    count = 1
    for size in shape:
        count *= size
    is_nested = len(shape) > 1 and bool(data) and isinstance(data[0], list)
    if not is_nested:
        if len(data) != count:
            raise InvalidInput(where, f"{len(data)} values", f"{count} values for the shape {list(shape)}")
        return data
    level: list[Any] = [data]
    for size in shape:
        if any(type(part) is not list or len(part) != size for part in level):
            raise InvalidInput(where, "nested unlike the shape", f"a flat list, or lists nested as {list(shape)}")
        level = list(chain.from_iterable(level))
    return level


def _outputs(value: Any, parameters: dict[str, Parameter]) -> tuple[dict[str, int], dict[str, bool]]:
    """Per requested output, in order: the number of classes asked for (0: values), and whether it is binary."""
    classes: dict[str, int] = {}
    binary: dict[str, bool] = {}
    default = _flag(parameters.get("binary_data_output", False), "parameters.binary_data_output")
    for i, item in enumerate(_objects(value, "outputs") if value is not None else []):
        where = f"outputs[{i}]"
        name = oip.checked_name(item.get("name"), f"{where}.name", classes)
        own = _parameters(item.get("parameters"), f"{where}.parameters")
        if "shared_memory_region" in own:
            raise InvalidInput(f"{where}.parameters.shared_memory_region", "shared memory is not served", "none")
        classes[name] = oip.checked_classes(own.get(oip.CLASSIFICATION, 0), f"{where}.parameters.{oip.CLASSIFICATION}")
        binary[name] = _flag(own.get("binary_data", default), f"{where}.parameters.binary_data")
    return classes, binary


def _json_data(array: Array, where: str) -> Any:
    if datatype_of(array) != BYTES:
        return np.ascontiguousarray(widened(array)).reshape(-1)
    try:
        return [e if isinstance(e, str) else bytes(e).decode() for e in array.reshape(-1)]
    except UnicodeDecodeError:
        raise InvalidInput(
            where, "BYTES that are not UTF-8 text do not go into JSON", "binary_data on that output"
        ) from None


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(value, list):
        oip.check_count(len(value), where)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidInput(where, "missing" if value is None else "not a list of objects", "a list of JSON objects")
    return value


def _parameters(value: Any, where: str) -> dict[str, Parameter]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidInput(where, f"of type {type(value).__name__}", "a JSON object")
    oip.check_count(len(value), where)
    for name, item in value.items():
        if not isinstance(item, _PARAMETER):
            raise InvalidInput(f"{where}.{name}", f"of type {type(item).__name__}", "a boolean, number or string")
    return value


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(where, f"{value!r}", "true or false")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidInput(where, f"of type {type(value).__name__}", "a string")
    return value
