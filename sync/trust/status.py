"""How long the signatures in a store still hold, and who can renew them. Only reads.

A role is due once half of its life is over: what is online has been signed again long before (after a third), so a role
that gets there has nobody left who signs it, and nodes stop taking releases when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from common.errors import KeyMissing
from sync.trust.keys import DESIRED, ROLES, Keys
from sync.trust.repository import Lives, Repository

DUE_SHARE: Final = 0.5  # of a role's life


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStatus:
    """`left`: share of the role's life, negative once it has expired. `can_sign`: enough of its keys are at hand."""

    role: str
    version: int
    expires: datetime
    left: float
    threshold: int
    keyids: tuple[str, ...]
    can_sign: bool

    @property
    def is_expired(self) -> bool:
        return self.left <= 0

    @property
    def is_due(self) -> bool:
        return self.left < DUE_SHARE

    def to_dict(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "version": self.version,
            "expires": self.expires.isoformat(),
            "left": round(self.left, 4),
            "threshold": self.threshold,
            "keyids": list(self.keyids),
            "can_sign": self.can_sign,
            "is_due": self.is_due,
            "is_expired": self.is_expired,
        }


def role_status(repository: Repository, keys: Keys | None, now: datetime, *, lives: Lives) -> tuple[RoleStatus, ...]:
    """Each role in the store, root first. Raises `TrustError` where there is no metadata, or it cannot be read."""
    signed, at_hand = repository.signed(), _at_hand(keys)
    found = []
    for role in ROLES:
        threshold, keyids = _signers(signed, role)
        one = RoleStatus(
            role=role,
            version=signed[role].version,
            expires=signed[role].expires,
            left=(signed[role].expires - now) / lives.of(role),
            threshold=threshold,
            keyids=tuple(keyids),
            can_sign=sum(keyid in at_hand for keyid in keyids) >= threshold,
        )
        found.append(one)
    return tuple(found)


def _signers(signed: Mapping[str, Any], role: str) -> tuple[int, list[str]]:
    """Threshold and key ids: by the root, or for the desired state by who delegates it."""
    found = signed["targets"].delegations.roles[DESIRED] if role == DESIRED else signed["root"].roles[role]
    return found.threshold, list(found.keyids)


def _at_hand(keys: Keys | None) -> dict[str, str]:
    """Key id -> role of the file, of those that can be read."""
    found: dict[str, str] = {}
    if keys is None:
        return found
    for role in ROLES:
        try:
            found[keys.signer(role).public_key.keyid] = role
        except KeyMissing:
            continue
    return found
