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
    is_probed: bool = False  # somebody is finding out whether it is back


class Rotation:
    """The nearest endpoint that works. One that failed is left alone for a second, twice as long after each further
    failure, for 30 s at most; then it is due for a look, and used again once that is answered. Calls go to it only
    where no other is left."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self._health = {address: _Health() for address in self._addresses}
        self.current = self._addresses[0]  # where the next call goes first

    def choose(self, tried: Collection[str], now: float) -> str | None:
        """Where to go next; None: every endpoint was tried."""
        return self._best(tried, now)

    def due(self, now: float) -> str | None:
        """An endpoint that somebody should have a look at now, and tell: a nearer one than the one in use."""
        for address in self._addresses[: self._addresses.index(self.current)]:
            health = self._health[address]
            if health.failures and now >= health.avoid_until and not health.is_probed:
                health.is_probed = True
                return address
        return None

    def failed(self, address: str, now: float) -> None:
        """The connection broke. Of all calls that were on it, the first one counts."""
        health = self._health[address]
        if health.is_probed or now >= health.avoid_until:
            health.is_probed = False
            health.avoid_until = now + min(COOL_S * 2**health.failures, MAX_COOL_S)
            health.failures = min(health.failures + 1, 16)
        self.current = self._best((), now) or address

    def answered(self, address: str) -> None:
        """An answer of any kind: the endpoint is back, and used again where it is nearer than the one in use."""
        if self._health[address].failures:
            self._health[address] = _Health()
            self.current = min(address, self.current, key=self._addresses.index)

    def _best(self, tried: Collection[str], now: float) -> str | None:
        untried = [address for address in self._addresses if address not in tried]
        return min(untried, key=lambda a: self._rank(self._health[a], now), default=None)

    def _rank(self, health: _Health, now: float) -> tuple[bool, float]:
        return health.failures > 0, max(now, health.avoid_until)
