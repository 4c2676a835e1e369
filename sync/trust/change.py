"""Carries out a change of the keys that count, written down before (`Plan`): each step may be taken twice, so whatever
cut it off, taking all of them again completes it.

Nodes take what the store says at every point. The role is signed by old and new keys together before the root names the
new ones alone; where old keys are lost, a root that names both comes in between. Roles that `targets` delegates to
change in one step with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securesystemslib.signer import Key, SSlibKey
from tuf.api.metadata import DelegatedRole, Role, Root, Targets

from common.errors import KeyMissing
from sync.trust.keys import Keys, make_key
from sync.trust.repository import Repository
from sync.trust.signing import TOP, Signers, delegated, signers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is being changed. `command`: that began it, and that completes it."""

    store: str
    command: str
    role: str
    threshold: int
    new: tuple[str, ...] = ()  # files of the keys to be made
    public: Mapping[str, str] | None = None  # further keys, which are somewhere else: raw in hex, by key id
    old: tuple[str, ...] = ()  # ids of the keys that go
    pattern: str | None = None  # of models, for a role that they are delegated to


class Change:
    """One plan, on its way."""

    def __init__(self, plan: Plan, keys: Keys, repository: Repository) -> None:
        self._plan, self._keys, self._repository = plan, keys, repository

    def complete(self) -> None:
        plan = self._plan
        for path in plan.new:
            make_key(Path(path))
        wanted = self._wanted()
        if plan.role in TOP:
            self._change_root(wanted)
        else:
            self._change_targets(wanted)
        for key in self._keys.files(plan.role):
            if key.keyid in plan.old:
                self._keys.set_aside(key)

    def _wanted(self) -> Signers:
        """The role's keys once all is done."""
        plan = self._plan
        now = signers_now(self._repository, plan.role)
        keys = {keyid: key for keyid, key in now.keys.items() if keyid not in plan.old}
        here = {str(one.path.resolve()): one for one in self._keys.files(plan.role)}
        for path in plan.new:
            if path not in here:
                raise KeyMissing(plan.role, f"{path} was made for it; give its folder with --keys")
            keys[here[path].keyid] = here[path].signer.public_key
        for keyid, raw in (plan.public or {}).items():
            keys[keyid] = SSlibKey(keyid, "ed25519", "ed25519", {"public": raw})
        return Signers(threshold=plan.threshold, keys=keys)

    def _change_root(self, wanted: Signers) -> None:
        plan, now = self._plan, self._repository.signers(self._plan.role)
        if not _is_same(now, wanted):
            if plan.role != "root":
                self._sign_for_both(now, wanted)
            self._commit(wanted)
        elif plan.role == "root" and not (plan.old or plan.new or plan.public):
            self._commit(wanted)  # nothing but a new life
        if plan.role != "root":
            self._sign_again()

    def _sign_for_both(self, now: Signers, wanted: Signers) -> None:
        """The metadata that is there when the root changes holds before and after."""
        role = self._plan.role
        if self._repository.can_sign(role, wanted) and not self._repository.can_sign(role, now):  # old keys are lost
            either = {**now.keys, **wanted.keys}
            self._commit(Signers(threshold=min(now.threshold, wanted.threshold), keys=either))
        self._sign_again(wanted)

    def _sign_again(self, also: Signers | None = None) -> None:
        role = self._plan.role
        changed = {role: self._repository.targets()} if role == "targets" else {}
        self._repository.move_in(changed, {} if also is None else {role: also})

    def _commit(self, signers: Signers) -> None:
        root = self._repository.newest_root()
        _set_signers(root, self._plan.role, signers)
        self._repository.commit_root(root)

    def _change_targets(self, wanted: Signers) -> None:
        """Who may sign and what they signed change in one step: readers see both, or neither."""
        role, targets = self._plan.role, self._repository.targets()
        path = None if self._plan.pattern is None else release_paths(self._plan.pattern)
        known = delegated(targets).get(role)
        if known is None:
            known = DelegatedRole(role, [], threshold=1, terminating=True, paths=[])
        elif _is_same(signers_of(targets, role), wanted) and (path is None or path in (known.paths or ())):
            return
        if path is not None and path not in (known.paths or ()):
            known.paths = [*(known.paths or ()), path]
        assert targets.delegations is not None
        targets.delegations.roles = {**delegated(targets), role: known}
        _set_signers(targets, role, wanted)
        self._repository.move_in({"targets": targets, role: self._repository.targets(role)})


def signers_now(repository: Repository, role: str) -> Signers:
    """As the role stands; without keys, where it is yet to be made."""
    is_known = role in TOP or role in delegated(repository.targets())
    return repository.signers(role) if is_known else Signers(threshold=1, keys={})


def release_paths(pattern: str) -> str:
    """Of all releases of models that match."""
    return f"releases/{pattern}/*"


def _set_signers(authority: Root | Targets, role: str, signers: Signers) -> None:
    """Also forgets the keys that no role has any more."""
    held: Any = authority if isinstance(authority, Root) else authority.delegations
    found: Role = held.roles[role]
    found.threshold, found.keyids = signers.threshold, list(signers.keys)
    keys: dict[str, Key] = {**held.keys, **signers.keys}
    used = {keyid for one in held.roles.values() for keyid in one.keyids}
    held.keys = {keyid: key for keyid, key in keys.items() if keyid in used}


def _is_same(one: Signers, other: Signers) -> bool:
    return one.threshold == other.threshold and set(one.keys) == set(other.keys)
