"""Pictures in, labels out: the form of the `classify` route, a convenience over the protocol's own infer.

Owns reading the pictures of an upload and writing the answer. The input is always named `image`: who knows the model
(here or behind a pool) puts the pictures where they belong.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from common.errors import EngineError, InvalidInput
from common.request import IMAGE, Context, Request, Response
from common.transport import oip
from common.transport.http_body import CHUNK_BYTES, heard, open_body, read_body

DEFAULT_TOP = 5
MAX_PICTURES = 1024
PICTURES = ("image/jpeg", "image/jpg", "image/png")


async def read_pictures(request: web.Request) -> list[bytes]:
    """The encoded pictures of a multipart form (fields named `image`) or of a raw body. Raises `InvalidInput`."""
    if request.content_type == "multipart/form-data":
        return await _read_form(request)
    if request.content_type in PICTURES:
        return [await read_body(request)]
    raise InvalidInput(
        "Content-Type",
        repr(request.content_type),
        f"multipart/form-data with fields {IMAGE!r}, or {PICTURES[0]} or {PICTURES[2]}",
    )


def top_of(request: web.Request) -> int:
    text = request.query.get("top", str(DEFAULT_TOP))
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= oip.MAX_CLASSES):
        raise InvalidInput("top", f"{text[:40]!r}", f"an integer, 1 to {oip.MAX_CLASSES}")
    return int(text)


def classify_request(model: str, pictures: list[bytes], top: int, context: Context) -> Request:
    batch = np.empty(len(pictures), dtype=object)
    batch[:] = pictures
    return Request(context=context, model=model, inputs={IMAGE: batch}, classes=top)


def render_classes(response: Response, pictures: int) -> dict[str, Any]:
    """The answer per picture, the best class first. Raises `EngineError` when it is no classification."""
    model = response.stamp.model
    rows = next(iter(response.outputs.values()), None)
    if rows is None or rows.ndim != 2 or len(rows) != pictures or rows.dtype.kind not in "OSU":
        raise EngineError(model, "the answer is not one list of classes per picture")
    return {
        "model": model,
        "version": response.stamp.version,
        "classes": [
            [
                {"label": c.label, "index": c.index, "probability": c.probability}
                for c in (oip.parse_class(text, model) for text in row)
            ]
            for row in rows
        ],
    }


async def _read_form(request: web.Request) -> list[bytes]:
    pictures: list[bytes] = []
    size = 0
    try:
        form = MultipartReader(request.headers, await open_body(request))
        while (part := await heard(form.next())) is not None:
            if not isinstance(part, BodyPartReader) or part.name != IMAGE:
                name = part.name if isinstance(part, BodyPartReader) else "nested parts"
                raise InvalidInput("form", f"a field named {str(name)[:80]!r}", _FORM)
            picture = bytearray()
            while not part.at_eof():
                picture += await heard(part.read_chunk(CHUNK_BYTES))
                if size + len(picture) > request.client_max_size:
                    raise web.HTTPRequestEntityTooLarge(request.client_max_size, size + len(picture))
                await asyncio.sleep(0)  # what has arrived (or was inflated) is not read in one go
            pictures.append(bytes(picture))
            size += len(picture)
            if len(pictures) > MAX_PICTURES:
                raise InvalidInput("form", f"more than {MAX_PICTURES} pictures", f"at most {MAX_PICTURES} in a call")
    except (ValueError, AssertionError, RuntimeError, HttpProcessingError) as exc:
        raise InvalidInput("form", f"broken multipart body: {' '.join(str(exc).split())}", _FORM) from exc
    if not pictures:
        raise InvalidInput("form", "no picture", _FORM)
    return pictures


_FORM = f"one or more files in fields named {IMAGE!r}"
