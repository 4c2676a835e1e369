"""Devices of a fleet, enrolled without a network."""

from __future__ import annotations

from pathlib import Path

from sync.pki.authority import Authority
from sync.pki.identity import Identity, Pending


def enrolled(authority: Authority, folder: Path, name: str, *, group: str = "default") -> Identity:
    """As `outrider sync enrol` leaves it."""
    pending = Pending(folder, name, authority.root)
    pending.finish(authority.enrol(pending.request(), authority.new_token(name, group=group)))
    return Identity(folder)
