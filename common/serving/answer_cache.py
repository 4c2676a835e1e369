"""The seam for caches of answers, and the key: a digest over everything that an answer depends on."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from typing import Protocol

import msgspec

from common.request import Request, Response
from common.tensors import datatype_of, pack

CACHE = "cache"  # the target in the stamp of an answer that was not computed for its caller


class Lookup(msgspec.Struct, frozen=True, eq=False):
    """What a look into the cache gave: perhaps an answer, and the request's digest, which is dear for large inputs.

    `key` and `version` say what would be an answer to the request; None: it may be neither kept nor shared.
    """

    response: Response | None = None
    digest: bytes | None = None
    key: str | None = None
    version: str = ""


class AnswerCache(Protocol):
    async def lookup(self, request: Request) -> Lookup:
        """The stored answer of the version that would answer now. Never raises, and never waits long."""
        ...

    def store(self, request: Request, response: Response, digest: bytes | None) -> asyncio.Future[None] | None:
        """Remembers an answer under the version that gave it; nothing without the digest, which `lookup` gave while
        the inputs were as the caller sent them. The outputs must not change any more. Never raises, never blocks.

        The future is done when every `lookup` to come will see it; None: at once.
        """
        ...


_NOTHING = Lookup()


class NoCache:
    """Caching switched off."""

    async def lookup(self, request: Request) -> Lookup:
        return _NOTHING

    def store(self, request: Request, response: Response, digest: bytes | None) -> asyncio.Future[None] | None:
        return None


def request_digest(request: Request) -> bytes:
    """SHA-256 over what is asked: inputs (names, dtypes, shapes, bytes), requested outputs, classes, parameters.

    Every part is length-prefixed, so that no two requests run into the same bytes. The order of the inputs does not
    matter; that of the outputs is the order of the answer's.
    """
    parts: list[bytes | str] = []
    for name in sorted(request.inputs):
        array = request.inputs[name]
        parts += ("input", name, datatype_of(array), repr(array.shape), pack(array))
    for name in request.outputs:
        parts += ("output", name)
    parts += ("classes", str(request.classes))
    for name in sorted(request.parameters):
        parts += ("parameter", name, repr(request.parameters[name]))
    return _digest("outrider request 1", *parts)


def cache_key(request: Request, version: str, digest: bytes, *, is_public: bool, identity: str = "") -> str:
    """SHA-256 (hex) over who asks, whom, and `request_digest`. A public answer is the same whoever asks.

    `identity`: that of the engine here whose answer it is; empty for an answer from elsewhere.
    """
    tenant = "" if is_public else f"tenant:{request.context.tenant}"
    return _digest("outrider answer 2", tenant, request.model, version, identity, digest).hex()


def _digest(*parts: bytes | str) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.digest()
