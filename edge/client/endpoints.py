"""Which of several endpoints a call goes to. Rules only: `now` is monotonic and handed in.

The first endpoint named is the first one used: the caller lists the nearest first (a Unix socket before a host across
the network), and two runs of one program take the same way. Who wants to spread load shuffles the list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from common.errors import ConfigError

COOL_S, MAX_COOL_S = 1.0, 30.0
_ADDRESS = re.compile(r"unix:.+|(?:[^\s:/\[\]]+|\[[0-9A-Fa-f:.%\w]+\]):(?P<port>[0-9]{1,5})", re.ASCII)


def parse_endpoints(endpoints: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses, each once, in their order. Raises `ConfigError` for what is no address of ours."""
    addresses = (endpoints,) if isinstance(endpoints, str) else tuple(endpoints)
    accepted = "host:port or unix:/path, of a gRPC listener"
    if not addresses:
        raise ConfigError("client", "endpoints", "there is none", accepted)
    for i, address in enumerate(addresses):
        match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if match is None or not 1 <= int(match["port"] or 1) <= 65535:
            raise ConfigError("client", f"endpoints[{i}]", f"{address!r} is no address", accepted)
    return tuple(dict.fromkeys(addresses))


@dataclass(slots=True)
class _Health:
    failures: int = 0
    avoid_until: float = -math.inf


class Rotation:
    """Stays with the endpoint that works. One that failed is avoided for a second, twice as long after each further
    failure, for 30 s at most; it is still tried when no other is left."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self._health = {address: _Health() for address in self._addresses}
        self.current = self._addresses[0]

    def choose(self, tried: Collection[str], now: float) -> str | None:
        """Where to go next; None: every endpoint was tried."""
        start = self._addresses.index(self.current)
        in_turn = self._addresses[start:] + self._addresses[:start]
        untried = [address for address in in_turn if address not in tried]
        return min(untried, key=lambda a: max(now, self._health[a].avoid_until), default=None)

    def failed(self, address: str, now: float) -> None:
        """The connection broke. Of all calls that were on it, the first one counts."""
        health = self._health[address]
        if now >= health.avoid_until:
            health.avoid_until = now + min(COOL_S * 2**health.failures, MAX_COOL_S)
            health.failures = min(health.failures + 1, 16)
        if address == self.current:
            self.current = self.choose((), now) or address

    def answered(self, address: str) -> None:
        """An answer of any kind. A late one from an endpoint that was left does not bring the client back to it."""
        self._health[address] = _Health()
