"""The first packet of an MQTT connection (CONNECT of MQTT 3.1.1), as far as it says who somebody claims to be.

It is read before the broker sees it: amqtt gives the session of a client identifier to whoever names it, and sends a
last will without asking whether its topic is allowed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from common.errors import IdentityRefused

_CONNECT: Final = 0x10
_HAS_WILL: Final = 0x04
_LEVEL: Final = 4  # of MQTT 3.1.1
_MAX_BYTES: Final = 16 << 10
_LENGTH_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """`raw` is the whole packet."""

    client: str
    will_topic: str | None
    raw: bytes


async def read_connect(reader: asyncio.StreamReader) -> Connect:
    """Raises `IdentityRefused` for anything else, `asyncio.IncompleteReadError` where the connection ends."""
    head = await reader.readexactly(1)
    if head[0] != _CONNECT:
        raise IdentityRefused("MQTT client", "its first packet is not CONNECT")
    size = 0
    for place in range(_LENGTH_BYTES):
        byte = await reader.readexactly(1)
        head += byte
        size |= (byte[0] & 0x7F) << (7 * place)
        if not byte[0] & 0x80:
            break
    else:
        raise IdentityRefused("MQTT client", "the length of its CONNECT is malformed")
    if size > _MAX_BYTES:
        raise IdentityRefused("MQTT client", f"its CONNECT has {size} bytes; accepted: at most {_MAX_BYTES}")
    body = await reader.readexactly(size)
    try:
        client, will_topic = _parse(body)
    except (IndexError, UnicodeDecodeError, ValueError) as exc:
        raise IdentityRefused("MQTT client", "its CONNECT is malformed") from exc
    return Connect(client=client, will_topic=will_topic, raw=head + body)


def _parse(body: bytes) -> tuple[str, str | None]:
    _protocol, at = _text(body, 0)
    level, flags = body[at], body[at + 1]
    if level != _LEVEL:
        raise IdentityRefused("MQTT client", f"it speaks level {level} of the protocol; accepted: MQTT 3.1.1")
    client, at = _text(body, at + 4)  # and the keep-alive
    return client, _text(body, at)[0] if flags & _HAS_WILL else None


def _text(body: bytes, at: int) -> tuple[str, int]:
    end = at + 2 + int.from_bytes(body[at : at + 2])
    if end > len(body) or at + 2 > len(body):
        raise ValueError("a text is cut off")
    return body[at + 2 : end].decode(), end
