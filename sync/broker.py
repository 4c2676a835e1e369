"""The embedded MQTT broker (amqtt): hints for one machine or a few hundred nodes, with nothing to install.

Owns amqtt. Listens by itself and hands connections over, so that port 0 works and the port is known. asyncio sets
TCP_NODELAY on accepted connections. Retained messages live in memory: announcers say them again after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter
from amqtt.broker import Broker

from common.errors import ConfigError

_ADDRESS: Final = "a free address of this machine; port 0: any free one"
_LISTENER: Final = "default"
_CONFIG: Final = {
    "listeners": {_LISTENER: {"type": "external", "bind": "unused"}},
    "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
}


@contextlib.asynccontextmanager
async def broker(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """A running broker; yields its address, host:port."""
    running = Broker(dict(_CONFIG))
    await running.start()
    try:
        server = await asyncio.start_server(partial(_hand_over, running), host, port)
    except (OSError, OverflowError) as exc:
        await running.shutdown()
        problem = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ConfigError("broker", f"{host}:{port}", f"cannot listen: {problem}", _ADDRESS) from exc
    try:
        bound_host, bound_port = server.sockets[0].getsockname()[:2]
        yield f"{bound_host}:{bound_port}"
    finally:
        server.close()
        await running.shutdown()


async def _hand_over(running: Broker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await running.external_connected(StreamReaderAdapter(reader), StreamWriterAdapter(writer), _LISTENER)
    finally:
        writer.close()
