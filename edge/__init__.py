"""The edge node. `from edge import Node, NodeConfig` runs one inside an application's own process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.transport.servers import ServerOptions
    from edge.config import CacheOptions, NodeConfig
    from edge.node import Node
    from hardware.serving import StaticModel

_HOMES = {
    "CacheOptions": "edge.config",
    "Node": "edge.node",
    "NodeConfig": "edge.config",
    "ServerOptions": "common.transport.servers",
    "StaticModel": "hardware.serving",
}
__all__ = ["CacheOptions", "Node", "NodeConfig", "ServerOptions", "StaticModel"]


def __getattr__(name: str) -> Any:
    """Loads a name when it is asked for: `outrider --help` needs no server."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
