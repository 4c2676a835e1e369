"""Rules of the Open Inference Protocol v2 that its JSON and its gRPC form share.

Owns the parameter names, the checks of shapes and names, and the classification extension's text form. The two wire
forms are in `oip_json` and `oip_grpc`.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from common.errors import EngineError, InvalidInput, NotFound
from common.request import Context, Parameter, Request
from common.tensors import BYTES, MAX_ELEMENTS, Array, Tensors, check_bytes_count, element_count, unpack

EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
)
CLASSIFICATION = "classification"  # on an output: that output's best classes; on the request: those of the first output
MAX_CLASSES = 1 << 16
MAX_DIMS = 32
MAX_OBJECTS = 1024  # inputs, requested outputs, parameters of one object: over it nothing is looked at
MAX_NAME = 255  # characters of a model's name or of a version
_NO_NAME = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

# Parameters that are the protocol's own: they become part of the context or of the answer's form.
_SCHEDULING = frozenset({"priority", "timeout"})
_RESERVED = _SCHEDULING | {CLASSIFICATION, "binary_data_output", "triton_enable_empty_final_response"}

# Extensions that stock clients can call and that we do not have, as a refusal says it.
NO_SHARED_MEMORY = "shared memory is not served; accepted: tensors in the request itself"
NO_TRACE_SETTINGS = "trace settings are not served; accepted: a traceparent beside each call"
NO_LOG_SETTINGS = "log settings are not served; accepted: the configuration file of the process"


class Body(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A parsed infer call before its context is known. `parameters` holds all of the request's own."""

    id: str = ""
    inputs: Tensors
    outputs: tuple[str, ...] = ()
    classes: int = 0
    parameters: Mapping[str, Parameter] = {}
    binary: Mapping[str, bool] = {}  # by output: JSON form only, is its data asked for in binary

    def request(self, model: str, context: Context) -> Request:
        return Request(
            context=context,
            model=model,
            inputs=self.inputs,
            outputs=self.outputs,
            classes=self.classes,
            parameters={k: v for k, v in self.parameters.items() if k not in _RESERVED},
        )


def server_version() -> str:
    try:
        return importlib.metadata.version("outrider")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def checked_name(name: object, where: str, seen: Iterable[str] = ()) -> str:
    if not isinstance(name, str) or not name:
        raise InvalidInput(where, f"{name!r} is no name", "a string that is not empty")
    if name in seen:
        raise InvalidInput(where, f"{name!r} is named twice", "each name once")
    return name


def check_model(model: str, version: str = "") -> None:
    """Raises `NotFound` for what can be no model or version: before it gets into metrics, logs and caches."""
    for kind, name in (("model", model), ("version", version)):
        if len(name) > MAX_NAME or _NO_NAME.search(name):
            cut = "..." if len(name) > 80 else ""
            raise NotFound(
                f"{kind} {name[:80]!r}{cut} is not known here; accepted: at most {MAX_NAME} characters, none of them a "
                "control character"
            )


def check_count(count: int, where: str) -> None:
    if count > MAX_OBJECTS:
        raise InvalidInput(where, f"{count} of them", f"at most {MAX_OBJECTS}")


def checked_shape(dims: Sequence[int], where: str) -> tuple[int, ...]:
    """A request's shape whose product is safe to compute with, zero dimensions left out of account."""
    if len(dims) > MAX_DIMS:
        raise InvalidInput(where, f"{len(dims)} dimensions", f"at most {MAX_DIMS}")
    shape = tuple(dims)
    if not element_count(shape, where) and math.prod(d for d in shape if d) > MAX_ELEMENTS:
        raise InvalidInput(where, f"shape {list(shape)} is too large", f"at most {MAX_ELEMENTS} elements")
    return shape


def tensor_from_raw(data: bytes | memoryview, datatype: str, shape: tuple[int, ...], where: str) -> Array:
    """Like `common.tensors.unpack`; also refuses BOOL bytes other than 0 and 1, and too many BYTES."""
    if datatype == BYTES:
        check_bytes_count(element_count(shape, where), where)
    array = unpack(data, datatype, shape, where)
    if datatype == "BOOL" and array.size and int(array.view(np.uint8).max()) > 1:
        raise InvalidInput(where, "BOOL data has bytes other than 0 and 1", "one byte an element, 0 or 1")
    return array


def checked_classes(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_CLASSES:
        raise InvalidInput(where, f"{value!r} is no number of classes", f"an integer, 0 to {MAX_CLASSES}")
    return value


def one_classified(outputs: Mapping[str, int], request_classes: int) -> int:
    """How many classes are asked for, of the request's own parameter and those of its outputs; 0: values."""
    asked = {name: classes for name, classes in outputs.items() if classes}
    if asked and len(outputs) > 1:
        raise InvalidInput(
            f"outputs.{next(iter(asked))}.parameters.{CLASSIFICATION}",
            "classes are asked for beside other outputs",
            "one requested output when it is classified",
        )
    return next(iter(asked.values()), request_classes)


def refuse_load_parameters(names: Iterable[str]) -> None:
    """A model is what its release says: a load call cannot bring its own config or files."""
    for name in names:
        raise InvalidInput(f"parameters.{name}", "a load call takes no parameters", "none")


@dataclass(frozen=True, slots=True)
class Class:
    """One row of a classification: the protocol writes it as ``value:index`` or ``value:index:label``."""

    probability: float
    index: int
    label: str


def parse_class(text: bytes | str, model: str) -> Class:
    parts = (text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)).split(":", 2)
    try:
        return Class(float(parts[0]), int(parts[1]), parts[2] if len(parts) > 2 else "")
    except (ValueError, IndexError) as exc:
        raise EngineError(model, f"classification {text!r} is not value:index:label") from exc
