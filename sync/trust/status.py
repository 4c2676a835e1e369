"""How long the signatures in a store still hold, and who can renew them. Only reads.

A role is due once half of its life is over: what is online has been signed again long before (after a third), so a role
that gets there has nobody left who signs it, and nodes stop taking releases when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from tuf.api.metadata import Targets

from common.errors import KeyMissing
from sync.trust.keys import ROLES, Keys
from sync.trust.repository import Lives, Repository
from sync.trust.signing import delegated

DUE_SHARE: Final = 0.5  # of a role's life


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStatus:
    """`left`: share of the role's life, negative once it has expired. `can_sign`: enough of its keys are at hand.
    `models`: patterns of those that a role signs which `targets` delegates them to."""

    role: str
    version: int
    expires: datetime
    left: float
    threshold: int
    keyids: tuple[str, ...]
    can_sign: bool
    models: tuple[str, ...] = ()

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
            "models": list(self.models),
            "is_due": self.is_due,
            "is_expired": self.is_expired,
        }


def role_status(repository: Repository, keys: Keys | None, now: datetime, *, lives: Lives) -> tuple[RoleStatus, ...]:
    """Each role in the store: root first, those that models are delegated to last. Raises `TrustError` where there is
    no metadata, or it cannot be read."""
    signed = repository.signed()
    targets = signed["targets"]
    assert isinstance(targets, Targets)
    found = []
    for role in (*ROLES, *(name for name in signed if name not in ROLES)):
        signers, here = repository.signers(role), _at_hand(keys, role)
        paths = () if role in ROLES else (delegated(targets)[role].paths or ())
        one = RoleStatus(
            role=role,
            version=signed[role].version,
            expires=signed[role].expires,
            left=(signed[role].expires - now) / lives.of(role),
            threshold=signers.threshold,
            keyids=tuple(signers.keys),
            can_sign=sum(keyid in here for keyid in signers.keys) >= signers.threshold,
            models=tuple(path.split("/")[1] for path in paths),
        )
        found.append(one)
    return tuple(found)


def _at_hand(keys: Keys | None, role: str) -> set[str]:
    """Ids of the role's keys; none where one of them cannot be used, which stops signing too."""
    try:
        return set() if keys is None else {one.keyid for one in keys.files(role)}
    except KeyMissing:
        return set()
