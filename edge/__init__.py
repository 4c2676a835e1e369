"""The edge node. `from edge import Node, NodeConfig` runs one inside an application's own process; `Client` and
`AsyncClient` call one from another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.transport.servers import ServerOptions
    from edge.client import AsyncClient, Client
    from edge.config import CacheOptions, NodeConfig
    from edge.node import Node
    from hardware.serving import StaticModel

_HOMES = {
    "AsyncClient": "edge.client",
    "CacheOptions": "edge.config",
    "Client": "edge.client",
    "Node": "edge.node",
    "NodeConfig": "edge.config",
    "ServerOptions": "common.transport.servers",
    "StaticModel": "hardware.serving",
}
__all__ = ["AsyncClient", "CacheOptions", "Client", "Node", "NodeConfig", "ServerOptions", "StaticModel"]


def __getattr__(name: str) -> Any:
    """Loads a name when it is asked for: `outrider --help` needs no server."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
