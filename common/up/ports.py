"""Ports of the one-machine system: a fixed block that people can remember, or any free ones."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from common.errors import ConfigError

DEFAULT_BASE = 8600


def fixed(names: Sequence[str], base: int) -> dict[str, int]:
    """`base` and up, in order. Raises `ConfigError` that names the first port in use."""
    if not 1024 <= base <= 65535 - len(names):
        raise ConfigError("up", "--base-port", f"got {base}", f"0 (free ports), or 1024..{65535 - len(names)}")
    ports = {name: base + i for i, name in enumerate(names)}
    for name, port in ports.items():
        with contextlib.closing(_socket()) as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError as exc:
                raise ConfigError(
                    "up", "--base-port", f"port {port} ({name}) is in use", "another base port, or 0 for free ones"
                ) from exc
    return ports


def free(names: Sequence[str]) -> dict[str, int]:
    """Ports that were free a moment ago; all are held while the others are drawn, so that no two are equal."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(contextlib.closing(_socket())) for _ in names]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return {name: sock.getsockname()[1] for name, sock in zip(names, sockets, strict=True)}


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock
