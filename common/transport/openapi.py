"""The OpenAPI 3.1 description of the HTTP API that node, gateway and worker serve at ``/openapi.json``.

Owns the document's frame and what an operation's statuses say. The operations are in `openapi_operations`.
"""

from __future__ import annotations

import functools
from typing import Any

from common.request import IMAGE
from common.transport import http_classify, oip, oip_json
from common.transport import openapi_schemas as part
from common.transport.listen import MAX_BODY_BYTES
from common.transport.openapi_operations import DESCRIPTION, FORM, OPERATIONS, Operation
from common.transport.openapi_schemas import Schema, ref

PATH = DESCRIPTION
_ABOUT = (
    "The Open Inference Protocol v2 with the extensions that `GET /v2` names, pictures in, classes out, and metrics. "
    "HEAD is answered wherever GET is; another method is 405 with Allow. Bodies may be compressed (Content-Encoding: "
    "gzip or deflate), and an inference answer is for who names one coding in Accept-Encoding. A field that comes "
    "several times counts as one, comma-separated. Integers are written without a fraction: 2, not 2.0. Every error is "
    "JSON with the one member `error`; only what is no HTTP that can be read is refused in plain text."
)
_WHEN = {
    400: "The call is wrong; the text says where and what would be accepted",
    401: "The server has tenants, and the call shows no key of one of them",
    403: "The key's tenant may not call in the name of the tenant that a header names",
    404: "No such model or version here",
    408: "Nothing of the body came for a while; the connection is closed",
    413: f"The body is larger than {MAX_BODY_BYTES} bytes",
    415: "The body has a Content-Encoding that is not known here; Accept-Encoding says which ones are",
    500: "The engine failed, or a fault that the server's log has",
    503: "Right call, wrong moment: not ready, overloaded or unreachable, or the caller's deadline passed",
}


@functools.cache
def document() -> bytes:
    """The description as JSON; the same for every process of this version."""
    return oip_json.dump(_document())


def _document() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider",
            "version": oip.server_version(),
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "security": [{}, *({name: []} for name in part.SECURITY)],
        "components": {"schemas": part.SCHEMAS, "securitySchemes": part.SECURITY},
    }


def _described(operation: Operation) -> dict[str, Any]:
    failures = operation.fails if operation.is_open else (401, *operation.fails)
    described: dict[str, Any] = {
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": {str(status): _failure(operation, status) for status in failures},
    }
    if operation.is_open:
        described["security"] = []
    if operation.answer:
        described["responses"]["200"] = {"description": "OK", "headers": operation.headers} | _content(operation.answer)
    if operation.about:
        described["description"] = operation.about
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body:
        described["requestBody"] = {"required": operation.is_body_needed} | _content(operation.body)
    return described


def _failure(operation: Operation, status: int) -> dict[str, Any]:
    schema = ref("Error")
    if status == 503 and operation.unready is not None:
        schema = {"anyOf": [operation.unready, schema]}
    headers = {401: part.CHALLENGE, 503: part.RETRY_AFTER}
    return {"description": _WHEN[status], "headers": headers.get(status, {})} | _content({"application/json": schema})


def _content(schemas: dict[str, Schema]) -> dict[str, Any]:
    content: dict[str, Any] = {media_type: {"schema": schema} for media_type, schema in schemas.items()}
    if FORM in content:
        content[FORM]["encoding"] = {IMAGE: {"contentType": ", ".join(http_classify.PICTURES)}}
    return {"content": content}
