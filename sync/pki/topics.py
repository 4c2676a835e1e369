"""Who may say and hear what over MQTT, by the name in a certificate. Pure; `mosquitto.py` says the same in its words.

The service alone announces hints. A node hears those of its group, and under its own name it says what it likes.
"""

from __future__ import annotations

from sync.pki.authority import SERVICE
from sync.pki.certificates import Facts

HINTS = "outrider/hint/"
NODES = "outrider/node/"


def may_publish(peer: Facts, topic: str) -> bool:
    if peer.name == SERVICE:
        return topic.startswith(HINTS)
    return topic.startswith(f"{NODES}{peer.name}/")


def may_hear(peer: Facts, topic: str) -> bool:
    """`topic` may be a filter: its wildcards stand behind what is allowed, never in it."""
    if peer.name == SERVICE:
        return topic.startswith((HINTS, NODES))
    return topic == f"{HINTS}{peer.group}" or topic.startswith(f"{NODES}{peer.name}/")
