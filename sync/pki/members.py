"""Who is connected to the embedded broker, by certificate: let in, asked at each message, thrown out when denied.

A client's identifier is its certificate's name, or that with "/" and something behind it: sessions belong to
identifiers, so nobody can take another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from common.errors import IdentityRefused
from sync.pki.certificates import Facts, from_der
from sync.pki.connect import Connect, read_connect
from sync.pki.denied import DenyList
from sync.pki.topics import may_hear, may_publish

logger = logging.getLogger(__name__)
_CONNECT_S: Final = 10.0
_SWEEP_S: Final = 1.0
_NOT_AUTHORIZED: Final = bytes((0x20, 2, 0, 5))  # CONNACK of MQTT 3.1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    facts: Facts
    writer: asyncio.StreamWriter


class Members:
    def __init__(self, deny: DenyList) -> None:
        self._deny = deny
        self._members: dict[str, _Member] = {}

    async def enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Connect | None:
        """Reads CONNECT; None where the connection is nobody's who may, who has been told so."""
        try:
            facts = self._deny.admit(from_der(writer.get_extra_info("ssl_object").getpeercert(True)))
            async with asyncio.timeout(_CONNECT_S):
                connect = await read_connect(reader)
            if connect.client != facts.name and not connect.client.startswith(f"{facts.name}/"):
                problem = f"its MQTT client identifier is not {facts.name!r}, or that with '/' and more behind it"
                raise IdentityRefused(facts.name, problem)
            if connect.will_topic is not None and not may_publish(facts, connect.will_topic):
                raise IdentityRefused(facts.name, "its last will goes to a topic that is not its own")
        except IdentityRefused as exc:
            logger.warning("an MQTT client was refused: %s", exc)
            writer.write(_NOT_AUTHORIZED)
            return None
        except (asyncio.IncompleteReadError, TimeoutError, OSError):
            return None
        self._members[connect.client] = _Member(facts=facts, writer=writer)
        return connect

    def leave(self, connect: Connect, writer: asyncio.StreamWriter) -> None:
        """Unless a newer connection has the identifier by now."""
        member = self._members.get(connect.client)
        if member is not None and member.writer is writer:
            del self._members[connect.client]

    def is_in(self, client: str | None) -> bool:
        return self._facts(client) is not None

    def may_publish(self, client: str | None, topic: str) -> bool:
        facts = self._facts(client)
        return facts is not None and may_publish(facts, topic)

    def may_hear(self, client: str | None, topic: str) -> bool:
        facts = self._facts(client)
        return facts is not None and may_hear(facts, topic)

    async def sweep(self) -> None:
        """Until cancelled: ends connections whose certificate was revoked or has expired."""
        while True:
            for client, member in list(self._members.items()):
                with self._refusals(client):
                    self._deny.check(member.facts)
            await asyncio.sleep(_SWEEP_S)

    def _facts(self, client: str | None) -> Facts | None:
        member = None if client is None else self._members.get(client)
        if client is None or member is None:
            return None
        with self._refusals(client):
            self._deny.check(member.facts)
            return member.facts
        return None

    @contextlib.contextmanager
    def _refusals(self, client: str) -> Iterator[None]:
        try:
            yield
        except IdentityRefused as exc:
            member = self._members.pop(client, None)
            if member is not None:
                logger.warning("an MQTT client is disconnected: %s", exc)
                member.writer.transport.abort()
