"""The seam for caches of answers, and the key: a digest over everything that an answer depends on."""

from __future__ import annotations

import hashlib
import struct
from typing import Protocol

from common.request import Request, Response
from common.tensors import datatype_of, pack


class AnswerCache(Protocol):
    async def lookup(self, request: Request) -> Response | None:
        """The stored answer of the version that would answer now, or None. Never raises."""
        ...

    def store(self, request: Request, response: Response) -> None:
        """Remembers an answer under the version that gave it. Never raises, never blocks."""
        ...


class NoCache:
    """Caching switched off."""

    async def lookup(self, request: Request) -> Response | None:
        return None

    def store(self, request: Request, response: Response) -> None:
        return None


def cache_key(request: Request, version: str, *, is_public: bool) -> str:
    """SHA-256 (hex) over the canonical request: tenant, model, version, inputs, requested outputs, parameters.

    Every part is length-prefixed, so that no two requests run into the same bytes; order of inputs does not matter.
    """
    digest = hashlib.sha256(b"outrider answer key 1")

    def add(*parts: bytes | str) -> None:
        for part in parts:
            data = part.encode() if isinstance(part, str) else part
            digest.update(struct.pack("<Q", len(data)))
            digest.update(data)

    add("" if is_public else f"tenant:{request.context.tenant}", request.model, version)
    for name in sorted(request.inputs):
        array = request.inputs[name]
        add("input", name, datatype_of(array), repr(array.shape), pack(array))
    for name in sorted(request.outputs):
        add("output", name)
    add("classes", str(request.classes))
    for name in sorted(request.parameters):
        add("parameter", name, repr(request.parameters[name]))
    return digest.hexdigest()
