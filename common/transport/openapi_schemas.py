"""The parts of the HTTP API's description that its operations share: schemas, headers, parameters, error answers.

Owns JSON Schema (the 2020-12 dialect of OpenAPI 3.1) for each body of `oip_json`, `oip_config`, `oip_statistics` and
`http_classify`. Enumerations come from the code that parses and renders them. Which route has what is in `openapi`.
"""

from __future__ import annotations

from typing import Any

from common.request import IMAGE, Priority, Privacy, Reason
from common.serving.catalog import ModelState
from common.tensors import DATATYPES, MAX_ELEMENTS
from common.transport import headers as names
from common.transport import http_classify, oip, oip_config, oip_json, tenants

Schema = dict[str, Any]

BINARY: Schema = {"type": "string", "format": "binary"}
_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_SCALAR = ["boolean", "number", "string"]


def ref(name: str, kind: str = "schemas") -> Schema:
    return {"$ref": f"#/components/{kind}/{name}"}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None, **more: Any) -> Schema:
    return {"type": "object", "required": list(required), "properties": required | (optional or {}), **more}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


_SHAPE = _list({"type": "integer", "minimum": 0, "maximum": MAX_ELEMENTS}, maxItems=oip.MAX_DIMS)
_DECLARED_SHAPE = _list({"type": "integer", "minimum": -1}, description="-1: a free dimension; the first is the batch")
_CLASSES: Schema = {"type": "integer", "minimum": 0, "maximum": oip.MAX_CLASSES}
_FREE: Schema = {"type": ["object", "null"], "additionalProperties": {"type": _SCALAR}}
_PARAMETERS: Schema = _FREE | {
    "properties": {
        "timeout": _COUNT | {"description": "The deadline in microseconds; 0: none"},
        "priority": {"type": "integer", "minimum": 0, "maximum": max(Priority), "description": "1: most urgent"},
        "binary_data_output": {"type": "boolean", "description": "Every output as binary data"},
        oip.CLASSIFICATION: _CLASSES | {"description": "So many best classes of the first output, for its values"},
    }
}
_INPUT = _object(
    {
        "name": _NAME,
        "datatype": {"enum": list(DATATYPES)},
        "shape": _SHAPE,
        "data": _list(
            {"type": [*_SCALAR, "array"]},
            description="Row-major, flat or nested as the shape says; BYTES are UTF-8 strings. In the binary form "
            "`parameters.binary_data_size` stands for it.",
        ),
    },
    {"parameters": _FREE},
)
_WANTED = _object(
    {"name": _NAME},
    {"parameters": _FREE | {"properties": {"binary_data": {"type": "boolean"}, oip.CLASSIFICATION: _CLASSES}}},
)
_OUTPUT = _object(
    {"name": _NAME, "datatype": {"enum": list(DATATYPES)}, "shape": _SHAPE},
    {
        "data": _list({"type": [*_SCALAR, "null"]}, description="null: NaN or an infinity; binary data is exact"),
        "parameters": _object({"binary_data_size": _COUNT}),
    },
)
_STAMP = {
    names.TARGET: _NAME | {"description": "The kind of place that answered: edge, cache or cloud"},
    names.MODEL: _NAME | {"description": "Percent-encoded where it is not printable ASCII, as are the other names"},
    names.VERSION: _NAME | {"description": "The version that answered"},
}
_STAMP_AT_TIMES = {
    names.BY: _NAME | {"description": "The process that answered"},
    names.REASON: {"enum": [r.value for r in Reason], "description": "Why the call left the edge, where it did"},
}
_TENSOR = _object({"name": _NAME, "datatype": {"enum": list(DATATYPES)}, "shape": _DECLARED_SHAPE})
_CONFIG_TENSOR = _object({"name": _NAME, "data_type": {"type": "string", "pattern": "^TYPE_"}, "dims": _DECLARED_SHAPE})
_DURATIONS = _object({"count": _COUNT, "ns": _COUNT})

SCHEMAS: dict[str, Schema] = {
    "Error": _object({"error": _TEXT | {"description": "What is wrong, where, and what would be accepted"}}),
    "Server": _object({"name": _TEXT, "version": _TEXT, "extensions": _list(_TEXT)}),
    "Live": _object({"live": {"const": True}}),
    "Ready": _object({"ready": {"type": "boolean"}}),
    "ModelReady": _object({"name": _TEXT, "ready": {"type": "boolean"}}),
    "Model": _object(
        {
            "name": _NAME,
            "versions": _list(_TEXT),
            "platform": _TEXT,
            "inputs": _list(_TENSOR),
            "outputs": _list(_TENSOR),
        }
    ),
    "ModelConfig": _object(
        {
            "name": _NAME,
            "platform": _TEXT,
            "backend": _TEXT,
            oip_config.MAX_BATCH: _COUNT,
            "input": _list(_CONFIG_TENSOR),
            "output": _list(_CONFIG_TENSOR),
        }
    ),
    "Statistics": _object(
        {
            "model_stats": _list(
                _object(
                    {
                        "name": _NAME,
                        "version": _TEXT,
                        "last_inference": _COUNT | {"description": "Unix time in milliseconds; 0: never"},
                        "inference_count": _COUNT,
                        "execution_count": _COUNT,
                        "inference_stats": _object(
                            {"success": _DURATIONS, "fail": _DURATIONS, "compute_infer": _DURATIONS}
                        ),
                        "batch_stats": _list(_object({"batch_size": _COUNT, "compute_infer": _DURATIONS})),
                    }
                )
            )
        }
    ),
    "Index": _list(
        _object({"name": _NAME, "version": _TEXT, "state": {"enum": [s.value for s in ModelState]}, "reason": _TEXT})
    ),
    "IndexRequest": _object({}, {"ready": {"type": "boolean", "description": "Only models that are ready"}}),
    "LoadRequest": _object({}, {"parameters": {"type": ["object", "null"], "maxProperties": 0}}),
    "UnloadRequest": _object({}, {"parameters": _FREE | {"description": "Of no effect: no model depends on another"}}),
    "Parameters": _PARAMETERS,
    "InferRequest": _object(
        {"inputs": _list(ref("InferInput"), minItems=1)},
        {
            "id": _TEXT,
            "parameters": ref("Parameters"),
            "outputs": {"type": ["array", "null"], "items": ref("InferRequestedOutput")},
        },
    ),
    "InferInput": _INPUT,
    "InferRequestedOutput": _WANTED,
    "InferResponse": _object(
        {
            "model_name": _NAME,
            "model_version": _NAME,
            "parameters": _object(_STAMP, _STAMP_AT_TIMES),
            "outputs": _list(ref("InferOutput")),
        },
        {"id": _NAME},
    ),
    "InferOutput": _OUTPUT,
    "ClassifyRequest": _object(
        {IMAGE: _list(BINARY, minItems=1, maxItems=http_classify.MAX_PICTURES)}, additionalProperties=False
    ),
    "ClassifyResponse": _object(
        {
            "model": _NAME,
            "version": _NAME,
            "classes": _list(
                _list(_object({"label": _TEXT, "index": _COUNT, "probability": {"type": "number"}})),
                description="One list per picture, the best class first",
            ),
        }
    ),
}


def _header(schema: Schema, *, is_required: bool = True) -> Schema:
    return {"schema": schema, "required": is_required}


_REQUEST_ID: Schema = {"type": "string", "pattern": "^[!-~]{1,128}$"}
CHALLENGE = {"WWW-Authenticate": _header(_NAME)}
RETRY_AFTER = {"Retry-After": _header({"type": "integer", "minimum": 1, "description": "Whole seconds"})}
STAMP_HEADERS = (
    {name: _header(schema) for name, schema in _STAMP.items()}
    | {name: _header(schema, is_required=False) for name, schema in _STAMP_AT_TIMES.items()}
    | {names.REQUEST_ID: _header(_REQUEST_ID | {"description": "The caller's, or one made here"})}
)
LENGTH_HEADER = {
    oip_json.HEADER_LENGTH: _header(
        {"type": "integer", "minimum": 1, "description": "In the binary form: bytes of JSON before the data"},
        is_required=False,
    )
}


def _asked(name: str, schema: Schema, text: str) -> Schema:
    return {"name": name, "in": "header", "schema": schema, "description": text}


CONTEXT_HEADERS = (
    _asked(names.REQUEST_ID, _REQUEST_ID, "Comes back in the answer and is in the logs of each process on the way"),
    _asked(
        names.DEADLINE_MS,
        {"type": "string", "pattern": r"^[0-9]{1,15}(\.[0-9]{1,9})?$", "examples": ["5000"]},
        "Milliseconds that the caller still waits, a decimal number; after them the answer is 503",
    ),
    _asked(
        names.PRIORITY, {"enum": [n for p in Priority for n in (p.name.lower(), str(p.value))]}, "The class of service"
    ),
    _asked(
        names.PRIVACY,
        {"enum": [p.value for p in Privacy]},
        "device_only: neither inputs nor outputs leave the device that answers",
    ),
    _asked(names.PIN, _TEXT, "Only this version may answer; percent-encoded where it is not printable ASCII"),
    _asked(names.TRACEPARENT, _TEXT, "W3C trace context, passed on; what is none is ignored"),
)
HEADER_LENGTH = _asked(
    oip_json.HEADER_LENGTH,
    {"type": "integer", "minimum": 1},
    "In the binary form: so many bytes of JSON come first, then the inputs' raw data in their order",
)
MODEL = {"name": "model", "in": "path", "required": True, "schema": _NAME}
VERSION = {"name": "version", "in": "path", "required": True, "schema": _NAME}
REGION = {"name": "region", "in": "path", "required": True, "schema": _NAME}
SECURITY: dict[str, Schema] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, where the server has tenants"},
    "key": {"type": "apiKey", "in": "header", "name": tenants.API_KEY, "description": "The same key"},
}
TOP = {
    "name": "top",
    "in": "query",
    "schema": {"type": "integer", "minimum": 1, "maximum": oip.MAX_CLASSES, "default": http_classify.DEFAULT_TOP},
    "description": "How many classes per picture",
}
