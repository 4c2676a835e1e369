"""What a server listens on: addresses, limits and the error for an address that cannot be had."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError

MAX_BODY_BYTES = 128 << 20
DRAIN_S = 1.0  # how long a server that closes waits for calls in progress; draining proper comes before that


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A running server: its TCP port (0: none) and every address as a client writes it."""

    port: int
    addresses: tuple[str, ...]


def cannot_listen(server: str, address: str, exc: Exception) -> ConfigError:
    problem = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    return ConfigError(server, address, f"cannot listen: {problem}", "a free address of this machine")
