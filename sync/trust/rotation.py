"""Whose keys are to count from now on: rotation, revocation, and roles that models are delegated to.

Decides, and writes what is to be into the folder of the keys before anything is done (`change` does it): a command that
was cut off at any point is completed by the same command again, and no other one begins before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import hexdigits
from typing import Final

from tuf.api.metadata import DelegatedRole

from common.config import from_json, to_json
from common.errors import ConfigError, KeyMissing, TrustError
from sync.disk import sync_folder, write_atomic
from sync.store.stores import AnyStore
from sync.trust.change import Change, Plan, release_paths, signers_now
from sync.trust.keys import DESIRED, KeyFile, Keys, read_public
from sync.trust.repository import Repository
from sync.trust.signing import TOP, delegated

_PLAN: Final = ".changing"
_LEAST_DIGITS: Final = 8  # of a key's id
_NAME: Final = "abcdefghijklmnopqrstuvwxyz0123456789-_"
_MODEL: Final = _NAME + _NAME.upper() + ".*?"


class Rotation:
    """Callers hold the store's lock around each call."""

    def __init__(self, store: AnyStore, keys: Keys, repository: Repository) -> None:
        self._keys, self._repository = keys, repository
        self._store = str(store.root.resolve() if isinstance(store.root, Path) else store.root)
        paths = [folder / _PLAN for folder in keys.folders]
        self._path = next((path for path in paths if path.exists()), paths[0])

    def rotate(
        self, role: str, *, threshold: int | None = None, add: int | None = None, public: Sequence[Path] = ()
    ) -> Plan:
        """Each key of the role that is here gives way to a new one beside it; or (`add`) none does, and so many more
        are made, in the folders that have fewest. `public`: in place of new keys, ones that are made elsewhere.

        Raises `KeyMissing` when keys that have to sign are not here, `TrustError` when there is no such role.
        """
        command = f"rotate {role}"
        plan = self._begun(command)
        if plan is None:
            signers = self._repository.signers(role)
            going = [one for one in self._keys.files(role) if one.keyid in signers.keys and add is None]
            if add is None and not going:
                raise KeyMissing(role, "no key of it that counts is here; one that is lost is replaced by `revoke`")
            folders = [one.path.parent for one in going] if add is None else self._emptiest(role, add)
            plan = self._plan(
                command, role, threshold or signers.threshold, folders, public, old=[one.keyid for one in going]
            )
        return self._complete(plan)

    def revoke(self, keyid: str, *, public: Sequence[Path] = ()) -> tuple[Plan, ...]:
        """What only this key (its id, or how it begins) signed is refused from now on, whichever roles it has. Where
        too few keys are left for a role, a new one takes its place. Nothing is done where it counts no more."""
        if len(keyid) < _LEAST_DIGITS or not set(keyid) <= set(hexdigits):
            raise TrustError(f"{keyid!r} is not a key's id; accepted: at least its first {_LEAST_DIGITS} hex digits")
        keyid = keyid.lower()
        command = f"revoke {keyid}"
        plan = self._begun(command)
        done = [] if plan is None else [self._complete(plan)]
        for role in (*TOP, *delegated(self._repository.targets())):
            signers = self._repository.signers(role)
            found = [one for one in signers.keys if one.startswith(keyid)]
            if len(found) > 1:
                raise TrustError(f"several keys of role {role!r} have ids that begin with {keyid}; give more of it")
            if found:
                is_short = len(signers.keys) - 1 < signers.threshold
                folders = [self._folder_of(role, found[0])] if is_short else []
                done.append(self._complete(self._plan(command, role, signers.threshold, folders, public, old=found)))
        if not done and not self._repository.has_counted(keyid):
            raise TrustError(f"no key that counts in {self._store} has an id that begins with {keyid}")
        return tuple(done)

    def delegate(
        self,
        role: str,
        pattern: str,
        *,
        threshold: int | None = None,
        add: int | None = None,
        public: Sequence[Path] = (),
    ) -> Plan:
        """From now on releases of models that match `pattern` (with `*` and `?`) are signed by `role` and not by
        `targets`. A role that is there already keeps its keys and gets these models too; a new one gets keys of its
        name that are here, or else `add` new ones (1)."""
        command = f"delegate {pattern} --name {role}"
        plan = self._begun(command)
        if plan is None:
            known = delegated(self._repository.targets())
            _check_names(role, pattern, known)
            own = () if role in known else self._keys.files(role)
            folders = [] if role in known or own else self._emptiest(role, add or 1)
            signers = signers_now(self._repository, role)
            plan = self._plan(command, role, threshold or signers.threshold, folders, public, own=own, pattern=pattern)
        return self._complete(plan)

    def _begun(self, command: str) -> Plan | None:
        """What the same command began and did not complete."""
        try:
            plan: Plan = from_json(self._path.read_bytes(), Plan, str(self._path))
        except FileNotFoundError:
            return None
        except ConfigError as exc:
            raise TrustError(f"{self._path} does not say what was begun: {exc}") from exc
        if (plan.command, plan.store) != (command, self._store):
            what = f"`outrider sync keys {plan.command} --store {plan.store}`"
            raise TrustError(f"{what} was begun in {self._path.parent} and is to be completed first: run it again")
        return plan

    def _plan(
        self,
        command: str,
        role: str,
        threshold: int,
        folders: Sequence[Path],
        public: Sequence[Path],
        *,
        old: Sequence[str] = (),
        own: Sequence[KeyFile] = (),
        pattern: str | None = None,
    ) -> Plan:
        given = [*(read_public(path) for path in public), *(one.signer.public_key for one in own)]
        if not given and any(one.is_external and one.keyid in old for one in self._keys.files(role)) and folders:
            raise KeyMissing(role, "a command signs for it; give the key that follows with --public")
        plan = Plan(
            store=self._store,
            command=command,
            role=role,
            threshold=threshold,
            new=() if public else tuple(str(one.resolve()) for one in self._keys.free_paths(role, tuple(folders))),
            public={key.keyid: key.keyval["public"] for key in given},
            old=tuple(old),
            pattern=pattern,
        )
        self._check(plan)
        write_atomic(self._path, to_json(plan))
        return plan

    def _check(self, plan: Plan) -> None:
        """What can be known beforehand: nothing is begun that these keys cannot complete."""
        kept = signers_now(self._repository, plan.role).keys.keys() - set(plan.old) | (plan.public or {}).keys()
        count = len(kept) + len(plan.new)
        if not 1 <= plan.threshold <= count:
            raise TrustError(f"role {plan.role!r} would have {count} keys, so {plan.threshold} of them cannot sign")
        here = len(kept & {one.keyid for one in self._keys.files(plan.role)}) + len(plan.new)
        if here < plan.threshold:
            raise KeyMissing(plan.role, f"{plan.threshold} keys are to sign for it, {here} of those would be here")
        for role in {"root" if plan.role in TOP else "targets", "snapshot", "timestamp"} - {plan.role}:
            if plan.role != "root" and not self._repository.can_sign(role):
                raise KeyMissing(role, f"{plan.command} needs it, and not enough of its keys are here")
        if plan.role == "root" and not self._repository.can_sign("root"):
            raise KeyMissing("root", "the next root has to be signed by the keys of the last, and not enough are here")

    def _complete(self, plan: Plan) -> Plan:
        Change(plan, self._keys, self._repository).complete()
        self._path.unlink()
        sync_folder(self._path.parent)
        return plan

    def _folder_of(self, role: str, keyid: str) -> Path:
        found = (one.path.parent for one in self._keys.files(role) if one.keyid == keyid)
        return next(found, self._keys.folder)

    def _emptiest(self, role: str, count: int) -> list[Path]:
        """Folders for new keys: the one with the fewest of the role, each time."""
        held = dict.fromkeys(self._keys.folders, 0)
        for one in self._keys.files(role):
            held[one.path.parent] += 1
        found = []
        for _ in range(count):
            found.append(min(held, key=lambda folder: held[folder]))
            held[found[-1]] += 1
        return found


def _check_names(role: str, pattern: str, known: Mapping[str, DelegatedRole]) -> None:
    is_name = 0 < len(role) <= 64 and all(c in _NAME for c in role)
    if not is_name or role in (*TOP, DESIRED):
        raise TrustError(
            f"{role!r} cannot be a role's name; accepted: a-z, 0-9, - and _, and none of {(*TOP, DESIRED)}"
        )
    if not pattern or any(c not in _MODEL for c in pattern):
        raise TrustError(f"{pattern!r} is no pattern of models; accepted: a model's name, with * and ?")
    owner = next((one for one, its in known.items() if release_paths(pattern) in (its.paths or ())), None)
    if owner not in (None, role):
        raise TrustError(f"models {pattern!r} are signed by role {owner!r} already")
