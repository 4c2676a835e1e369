"""Whether an address keeps other machines out."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # what another name means can change
