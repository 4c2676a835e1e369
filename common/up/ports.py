"""Ports of the one-machine system: a fixed block that people can remember, or any free ones."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Sequence

from common.errors import ConfigError

DEFAULT_BASE = 8600
_BELOW_EPHEMERAL = (12_000, 32_000)  # Linux gives outgoing connections 32768 and up


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
    """Ports that are free now, outside the range that the kernel gives to outgoing connections: those come and go.

    All are held while the others are drawn, so that no two are equal. Raises `ConfigError` where too few are free.
    """
    ports: dict[str, int] = {}
    candidates = random.sample(range(*_BELOW_EPHEMERAL), 64 * len(names))
    with contextlib.ExitStack() as stack:
        for port in candidates:
            if len(ports) == len(names):
                break
            sock = stack.enter_context(contextlib.closing(_socket()))
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", port))
                ports[names[len(ports)]] = port
    if len(ports) < len(names):
        raise ConfigError("up", "--base-port", "too few free ports on this machine", "a base port of a free block")
    return ports


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock
