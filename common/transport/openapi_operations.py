"""What each route of the HTTP API takes, answers and may fail with: the table of its description.

Owns the operations; the schemas that they name are in `openapi_schemas`, the document is made in `openapi`, and the
routes themselves are in `http_server`: a test holds those against this table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common.transport import http_classify, oip_json
from common.transport import openapi_schemas as part
from common.transport.openapi_schemas import Schema, ref

DESCRIPTION = "/openapi.json"
FORM = "multipart/form-data"
_BINARY_FORM = (
    f"Binary tensors: JSON of {oip_json.HEADER_LENGTH} bytes, in which an input has `parameters.binary_data_size` for "
    "its `data`, then the raw little-endian data in order; each BYTES element after its uint32 length."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route. `answer` and `body` map media types to schemas; `fails` lists the statuses of its errors."""

    method: str
    path: str
    id: str
    tag: str
    summary: str
    about: str = ""
    parameters: tuple[Schema, ...] = ()
    body: dict[str, Schema] = field(default_factory=dict)
    is_body_needed: bool = False
    answer: dict[str, Schema] = field(default_factory=dict)  # of status 200; empty: the route only refuses
    headers: dict[str, Schema] = field(default_factory=dict)  # of status 200
    fails: tuple[int, ...] = ()
    unready: Schema | None = None  # what else a 503 may hold
    is_open: bool = False  # needs no key where others do


def _json(name: str) -> dict[str, Schema]:
    return {"application/json": ref(name)}


def _of_models() -> list[Operation]:
    """Each of them twice: for the version that serves, and for one that is named."""
    operations = []
    for path, suffix, where in (
        ("/v2/models/{model}", "", (part.MODEL,)),
        ("/v2/models/{model}/versions/{version}", "_of_version", (part.MODEL, part.VERSION)),
    ):
        reads: dict[str, Any] = {"method": "get", "tag": "models", "parameters": where, "fails": (404, 500, 503)}
        calls: dict[str, Any] = {
            "method": "post",
            "tag": "inference",
            "is_body_needed": True,
            "fails": (400, 403, 404, 408, 413, 415, 500, 503),
        }
        operations += [
            Operation(path=path, id=f"model{suffix}", summary="Inputs and outputs", answer=_json("Model"), **reads),
            Operation(
                path=f"{path}/ready",
                id=f"model_ready{suffix}",
                summary="Is the model ready",
                answer=_json("ModelReady"),
                unready=ref("ModelReady"),
                **reads,
            ),
            Operation(
                path=f"{path}/config",
                id=f"model_config{suffix}",
                summary="The configuration, in Triton's names",
                answer=_json("ModelConfig"),
                **reads,
            ),
            Operation(
                path=f"{path}/stats",
                id=f"model_statistics{suffix}",
                summary="What was counted for the model",
                answer=_json("Statistics"),
                **reads | {"fails": (400, *reads["fails"])},
            ),
            Operation(
                path=f"{path}/infer",
                id=f"infer{suffix}",
                summary="Tensors in, tensors out",
                about=_BINARY_FORM,
                parameters=(*where, *part.CONTEXT_HEADERS, part.HEADER_LENGTH),
                body=_json("InferRequest") | {"application/octet-stream": part.BINARY},
                answer=_json("InferResponse") | {"application/octet-stream": part.BINARY},
                headers=part.STAMP_HEADERS | part.LENGTH_HEADER,
                **calls,
            ),
            Operation(
                path=f"{path}/classify",
                id=f"classify{suffix}",
                summary="Pictures in, classes out",
                parameters=(*where, part.TOP, *part.CONTEXT_HEADERS),
                body={FORM: ref("ClassifyRequest")} | dict.fromkeys(http_classify.PICTURES, part.BINARY),
                answer=_json("ClassifyResponse"),
                headers=part.STAMP_HEADERS,
                **calls,
            ),
        ]
    return operations


def _of_repository() -> list[Operation]:
    index: dict[str, Any] = {
        "path": "/v2/repository/index",
        "tag": "repository",
        "answer": _json("Index"),
        "fails": (400, 408, 413, 415, 500, 503),
    }
    change: dict[str, Any] = {
        "method": "post",
        "tag": "repository",
        "parameters": (part.MODEL,),
        "answer": {"application/json": {"type": "object", "maxProperties": 0}},
        "fails": (400, 404, 408, 413, 415, 500, 503),
    }
    model = "/v2/repository/models/{model}"
    return [
        Operation(method="get", id="index", summary="The models and their states", **index),
        Operation(
            method="post", id="select_index", summary="The same, or the ready ones", body=_json("IndexRequest"), **index
        ),
        Operation(
            path=f"{model}/load", id="load", summary="Open what is installed", body=_json("LoadRequest"), **change
        ),
        Operation(
            path=f"{model}/unload", id="unload", summary="Close the engine", body=_json("UnloadRequest"), **change
        ),
    ]


def _of_server() -> list[Operation]:
    reads: dict[str, Any] = {"method": "get", "tag": "server"}
    opened = reads | {"is_open": True}
    return [
        Operation(path="/v2", id="server", summary="Name, version, extensions", answer=_json("Server"), **reads),
        Operation(path="/v2/health/live", id="live", summary="Is it running", answer=_json("Live"), **opened),
        Operation(
            path="/v2/health/ready",
            id="ready",
            summary="Does it take new calls",
            answer=_json("Ready"),
            fails=(503,),
            unready=ref("Ready"),
            **opened,
        ),
        Operation(
            path="/v2/models/stats",
            id="statistics",
            summary="What was counted for the ready models",
            answer=_json("Statistics"),
            fails=(400, 404, 500, 503),
            **reads,
        ),
        Operation(
            path="/metrics",
            id="metrics",
            summary="Metrics in Prometheus's text form",
            answer={"text/plain": {"type": "string"}},
            **opened,
        ),
        Operation(
            path=DESCRIPTION,
            id="openapi",
            summary="This description",
            answer={"application/json": {"type": "object", "required": ["openapi", "paths"]}},
            **opened,
        ),
    ]


def _refused() -> list[Operation]:
    """The protocol's extensions that are not served: each has its routes, which say so."""
    routes: list[tuple[str, str, str, tuple[Schema, ...]]] = []
    for memory in ("systemsharedmemory", "cudasharedmemory"):
        for path, suffix, where in ((f"/v2/{memory}", "", ()), (f"/v2/{memory}/region/{{region}}", "_region", _REGION)):
            routes.append(("get", f"{path}/status", f"{memory}{suffix}_status", where))
            routes.append(("post", f"{path}/unregister", f"{memory}{suffix}_unregister", where))
        routes.append(("post", f"/v2/{memory}/region/{{region}}/register", f"{memory}_region_register", _REGION))
    for path, name, where in (
        ("/v2/trace/setting", "trace_setting", ()),
        ("/v2/models/{model}/trace/setting", "model_trace_setting", (part.MODEL,)),
        ("/v2/logging", "logging", ()),
    ):
        routes += [("get", path, name, where), ("post", path, f"change_{name}", where)]
    return [
        Operation(
            method=method, path=path, id=name, tag="refused", summary="Not served", parameters=where, fails=(400,)
        )
        for method, path, name, where in routes
    ]


_REGION = (part.REGION,)
OPERATIONS: tuple[Operation, ...] = (*_of_server(), *_of_models(), *_of_repository(), *_refused())
