"""The port for nodes that have no certificate yet: only the server shows one, and a token is worth one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from common.errors import IdentityRefused, OutriderError
from sync.pki.authority import Authority
from sync.pki.certificates import read_certificate
from sync.pki.door import Door, Peer
from sync.proto import sync_pb2, sync_pb2_grpc

logger = logging.getLogger(__name__)
_MAX_REQUEST_BYTES = 16 << 10


@contextlib.asynccontextmanager
async def enrolment(authority: Authority, door: Door, host: str, port: int) -> AsyncIterator[str]:
    """The running port; yields its address. Raises RuntimeError where it cannot be bound."""
    options = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _MAX_REQUEST_BYTES))
    server = grpc.aio.server(options=options)
    sync_pb2_grpc.add_EnrolmentServicer_to_server(_Enrolment(authority), server)
    bound = door.bind(server, f"{host}:{port}")
    await server.start()
    try:
        yield f"{host}:{bound}"
    finally:
        await server.stop(1.0)


class _Enrolment(sync_pb2_grpc.EnrolmentServicer):
    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    async def Enrol(self, request: sync_pb2.EnrolRequest, context: Any) -> sync_pb2.Certificate:  # noqa: N802
        return await _issued(context, self._authority.enrol, request.request, request.token)


async def renewed(authority: Authority, peer: Peer, request: bytes, context: Any) -> sync_pb2.Certificate:
    """The answer to `Renew`."""
    return await _issued(context, authority.renew, request, peer.certificate)


async def _issued(context: Any, issue: Any, *args: Any) -> sync_pb2.Certificate:
    try:
        made = await asyncio.to_thread(issue, *args)
    except IdentityRefused as exc:
        logger.warning("a certificate was refused to %s: %s", context.peer(), exc)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(exc))
    except (OutriderError, OSError) as exc:
        logger.error("no certificate can be issued: %s", exc)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "no certificate can be issued now")
    facts = read_certificate(made)
    logger.info("certificate %s was issued to %r, until %s", facts.serial, facts.name, facts.ends.isoformat())
    return sync_pb2.Certificate(certificate=made)
