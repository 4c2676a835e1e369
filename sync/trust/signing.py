"""Which role signs what, whose signatures count for it, and signing so that they are enough: thresholds, old and new
keys at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from securesystemslib.signer import Key
from tuf.api.metadata import DelegatedRole, Metadata, Root, Targets

from common.errors import KeyMissing, TrustError
from sync.trust.keys import KeyFile

TOP: Final = ("root", "targets", "snapshot", "timestamp")  # roles whose keys the root names


@dataclass(frozen=True, slots=True, kw_only=True)
class Signers:
    """The public keys of a role, by id, and how many of them have to sign."""

    threshold: int
    keys: Mapping[str, Key]


def delegated(targets: Targets) -> dict[str, DelegatedRole]:
    """The roles that `targets` delegates to, in the order in which they are asked."""
    roles = None if targets.delegations is None else targets.delegations.roles
    return dict(roles or {})


def role_of(targets: Targets, path: str) -> str:
    """Which role signs a target: the first that has it delegated."""
    return next((name for name, one in delegated(targets).items() if one.is_delegated_path(path)), "targets")


def signers_of(authority: Root | Targets, role: str) -> Signers:
    """As the root says it of its roles, and `targets` of those that it delegates to."""
    try:
        found = authority.get_delegated_role(role)
        return Signers(threshold=found.threshold, keys={keyid: authority.get_key(keyid) for keyid in found.keyids})
    except ValueError as exc:
        raise TrustError(f"there is no role {role!r} in this store") from exc


def sign(role: str, signed: Any, here: Sequence[KeyFile], folders: Sequence[Path], needed: Sequence[Signers]) -> bytes:
    """Signed metadata with the signature of each key in `here` that counts for one of `needed`.

    Raises `KeyMissing` where that is not enough for each of them; keys that do not count (any more) are named then.
    """
    metadata = Metadata(signed)
    counting = {keyid for one in needed for keyid in one.keys}
    have = {one.keyid: one for one in here if one.keyid in counting}
    for one in needed:
        count = sum(keyid in have for keyid in one.keys)
        if count < one.threshold:
            strangers = [f"{key.path} does not count" for key in here if key.keyid not in counting]
            ids = ", ".join(keyid[:8] for keyid in one.keys)
            where = ", ".join(map(str, folders))
            problem = f"{count} of the {one.threshold} needed are in {where}; those that count: {ids}"
            raise KeyMissing(role, "; ".join((problem, *strangers)))
    for key in have.values():
        metadata.sign(key.signer, append=True)
    return metadata.to_bytes()
