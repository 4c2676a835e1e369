"""The publisher's side of TUF: signs releases and desired state, and moves a whole new state in at once.

Roles: `targets` signs manifests (``releases/*/*``), but those of models that it delegates to a role of their own, and
delegates ``desired/*`` to the online role `desired`. Snapshots are consistent (each file but timestamp.json carries its
version in its name), so a reader sees the old state or the new one; timestamp.json is replaced last. Whose keys count
is in the root and in `targets`; `rotation` changes that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import (
    DelegatedRole,
    Delegations,
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)

from common.clock import Clock, SystemClock
from common.errors import TrustError
from sync.store import TIMESTAMP
from sync.store.stores import AnyStore
from sync.trust.keys import DESIRED, Keys
from sync.trust.signing import TOP, Signers, delegated, role_of, sign, signers_of
from sync.trust.time import read_signed_at, write_signed_at

T = TypeVar("T", Root, Targets, Snapshot, Timestamp)
Changed = Mapping[str, Targets]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """For how long a signature of each role is good, in days. Online roles are signed again after a third of it. Roles
    that `targets` delegates models to live as long as itself."""

    root: float = 3650.0
    targets: float = 365.0
    desired: float = 90.0
    snapshot: float = 14.0
    timestamp: float = 3.0

    def of(self, role: str) -> timedelta:
        return timedelta(days=float(getattr(self, role, self.targets)))


class Repository:
    """Signed metadata in a store. Callers hold the store's lock around whatever changes it."""

    def __init__(self, store: AnyStore, keys: Keys, *, lives: Lives | None = None, clock: Clock | None = None) -> None:
        self._store, self._keys = store, keys
        self._lives, self._clock = lives or Lives(), clock or SystemClock()
        self._root_version = 1  # at least: roots are only added

    def create(self) -> bytes:
        """Signs the first root and empty metadata. Returns the root, which nodes are given to begin with."""
        if self._store.read(TIMESTAMP) is not None:
            raise TrustError(f"{self._store.where()} has signed metadata already")
        root, now = Root(consistent_snapshot=True), self._clock.now()
        for role in TOP:
            root.add_key(self._keys.signer(role).public_key, role)
        data = self._sign("root", root, now, signers_of(root, "root"))
        self._store.replace("metadata/1.root.json", data)
        changed = {"targets": self._first_targets(), DESIRED: Targets()}
        self._move_in(changed, root, Snapshot(), Timestamp(), now, {})
        return data

    def root(self) -> bytes:
        """The first root: what a node trusts before it has heard anything."""
        data = self._store.read("metadata/1.root.json")
        if data is None:
            raise TrustError(f"{self._store.where()} has no root metadata; create it with `outrider sync keys init`")
        return data

    def newest_root(self) -> Root:
        if self._store.read(f"metadata/{self._root_version}.root.json") is None:
            self._root_version = 1  # somebody put an older store in its place
        while self._store.read(f"metadata/{self._root_version + 1}.root.json") is not None:
            self._root_version += 1
        return self._parse(f"metadata/{self._root_version}.root.json", Root)

    def signed(self) -> dict[str, Root | Targets | Snapshot | Timestamp]:
        """What is signed now, by role; the newest root, and roles that models are delegated to last."""
        signed: dict[str, Root | Targets | Snapshot | Timestamp] = {"root": self.newest_root()}
        signed |= {"targets": self.targets(), "snapshot": self._snapshot(), "timestamp": self._timestamp()}
        return signed | {role: self.targets(role) for role in delegated(self.targets())}

    def targets(self, role: str = "targets") -> Targets:
        """What a role lists; nothing yet, where it has never signed."""
        meta = self._snapshot().meta.get(f"{role}.json")
        if meta is not None:
            return self._parse(f"metadata/{meta.version}.{role}.json", Targets)
        nothing = Targets()
        nothing.version = 0
        return nothing

    def signers(self, role: str) -> Signers:
        """Whose signatures count for a role now."""
        return signers_of(self.newest_root() if role in TOP else self.targets(), role)

    def target(self, path: str) -> bytes | None:
        """The newest content of a target, manifest or desired state."""
        name = self.target_name(path)
        return None if name is None else self._store.read(name)

    def target_name(self, path: str) -> str | None:
        """Under which name the store has it."""
        targets = self.targets()
        role = role_of(targets, path)
        listed = targets.targets.get(path) or (None if role == "targets" else self.targets(role).targets.get(path))
        return None if listed is None else stored_name(listed)

    def listed(self, start: str) -> dict[str, str]:
        """Every target whose path starts so, and the name under which the store has (or had) it."""
        found: dict[str, str] = {}
        for role in (*reversed(delegated(self.targets())), "targets"):
            targets = self.targets(role).targets.values()
            found |= {one.path: stored_name(one) for one in targets if one.path.startswith(start)}
        return found

    def add(
        self, releases: Mapping[str, bytes], desired: Mapping[str, bytes], *, dropped: Collection[str] = ()
    ) -> None:
        """Signs new manifests and new desired states together: readers see all of them or none. A manifest is signed by
        the role that has its model; `targets` also where its own signature gets old and its keys are here. `dropped`:
        paths that those roles list no more."""
        top = self.targets()
        changed = {"targets": top, DESIRED: self.targets(DESIRED)}
        for role, contents in ((None, releases), (DESIRED, desired)):
            for path, data in contents.items():
                owner = role or role_of(top, path)
                if owner not in changed:
                    changed[owner] = self.targets(owner)
                target = TargetFile.from_data(path, data, ["sha256"])
                changed[owner].targets[path] = target
                self._store.replace(stored_name(target), data)
        is_mine = any(role_of(top, path) == "targets" for path in releases)
        if not is_mine and not (self._is_due("targets", top.expires, self._now()) and self.can_sign("targets")):
            del changed["targets"]
        for signed in changed.values():
            for path in dropped:
                signed.targets.pop(path, None)
        self.move_in(changed)

    def renew(self) -> bool:
        """Signs the online roles again when a third of one's life is over. False when nothing was due."""
        online, now = self.targets(DESIRED), self._now()
        changed = {DESIRED: online} if self._is_due(DESIRED, online.expires, now) else {}
        found = {"snapshot": self._snapshot(), "timestamp": self._timestamp()}
        if not changed and not any(self._is_due(role, signed.expires, now) for role, signed in found.items()):
            return False
        self.move_in(changed)
        return True

    def has_counted(self, keyid: str) -> bool:
        """Whether a key whose id begins so counted once, as far as the store remembers."""
        names = [f"metadata/{version}.root.json" for version in range(1, self.newest_root().version)]
        names += [f"metadata/{version}.targets.json" for version in range(1, self.targets().version)]
        found = [data for name in names if (data := self._store.read(name)) is not None]
        return any(f'"{keyid}'.encode() in data for data in found)

    def can_sign(self, role: str, signers: Signers | None = None) -> bool:
        """Whether enough keys are here of those that count (now, or else of `signers`)."""
        signers = signers or self.signers(role)
        here = {one.keyid for one in self._keys.files(role)}
        return sum(keyid in here for keyid in signers.keys) >= signers.threshold

    def move_in(self, changed: Changed, also: Mapping[str, Signers] | None = None) -> None:
        """Signs new versions of roles, and snapshot and timestamp over them. `also`: by role, signers that have to be
        content with its signatures besides those that count now."""
        root, now = self.newest_root(), self._now()
        if root.expires <= now:
            problem = (
                f"the root's signature ended at {root.expires:%Y-%m-%d %H:%M}, the clock reads {now:%Y-%m-%d %H:%M}"
            )
            raise TrustError(
                f"{problem}: set the clock right, or sign it again (`outrider sync keys rotate root --add 0`)"
            )
        for signed in changed.values():
            signed.version += 1
        self._move_in(changed, root, self._snapshot(), self._timestamp(), now, also or {})

    def commit_root(self, root: Root) -> None:
        """Signs the next root, which `root` is the content of, for those that trust the last one and with its own keys:
        from now on nodes go by it."""
        last = self.newest_root()
        root.version = last.version + 1
        data = self._sign("root", root, self._now(), signers_of(last, "root"), signers_of(root, "root"))
        self._store.replace(f"metadata/{root.version}.root.json", data)
        self._store.sync()

    def _first_targets(self) -> Targets:
        targets = Targets()
        online = DelegatedRole(DESIRED, [], threshold=1, terminating=True, paths=["desired/*"])
        targets.delegations = Delegations(keys={}, roles={DESIRED: online})
        targets.add_key(self._keys.signer(DESIRED).public_key, DESIRED)
        return targets

    def _move_in(
        self,
        changed: Changed,
        root: Root,
        snapshot: Snapshot,
        timestamp: Timestamp,
        now: datetime,
        also: Mapping[str, Signers],
    ) -> None:
        """Writes what is new from the bottom up; readers follow it once timestamp.json is there."""
        targets = changed.get("targets") or self.targets()

        def signature(role: str, signed: Any) -> bytes:
            extra = [also[role]] if role in also else []
            return self._sign(role, signed, now, signers_of(root if role in TOP else targets, role), *extra)

        for role, signed in changed.items():
            data = signature(role, signed)
            self._store.replace(f"metadata/{signed.version}.{role}.json", data)
            snapshot.meta[f"{role}.json"] = MetaFile.from_data(signed.version, data, ["sha256"])
        snapshot.version = timestamp.snapshot_meta.version + 1
        data = signature("snapshot", snapshot)
        self._store.replace(f"metadata/{snapshot.version}.snapshot.json", data)
        timestamp.snapshot_meta = MetaFile.from_data(snapshot.version, data, ["sha256"])
        timestamp.version += 1
        self._store.sync()
        self._store.replace(TIMESTAMP, signature("timestamp", timestamp))
        self._store.sync()

    def _timestamp(self) -> Timestamp:
        return self._parse(TIMESTAMP, Timestamp)

    def _snapshot(self) -> Snapshot:
        return self._parse(f"metadata/{self._timestamp().snapshot_meta.version}.snapshot.json", Snapshot)

    def _parse(self, name: str, kind: type[T]) -> T:
        data = self._store.read(name)
        if data is None:
            raise TrustError(f"{self._store.where(name)} is missing; create metadata with `outrider sync keys init`")
        try:
            signed = Metadata[Any].from_bytes(data).signed
        except RepositoryError as exc:
            raise TrustError(f"{self._store.where(name)} cannot be parsed: {exc}") from exc
        if not isinstance(signed, kind):
            raise TrustError(f"{self._store.where(name)} is metadata of another role")
        return signed

    def _sign(self, role: str, signed: Any, now: datetime, *needed: Signers) -> bytes:
        signed.expires = now + self._lives.of(role)
        write_signed_at(signed, now)
        return sign(role, signed, self._keys.files(role), self._keys.folders, needed)

    def _is_due(self, role: str, expires: datetime, now: datetime) -> bool:
        return expires - now < self._lives.of(role) * 2 / 3

    def _now(self) -> datetime:
        """Never before the last signature: nodes know of it, and what would end before it is no good to them."""
        now, data = self._clock.now(), self._store.read(TIMESTAMP)
        last = None if data is None else read_signed_at(self._timestamp())
        return now if last is None else max(now, last)


def stored_name(target: TargetFile) -> str:
    """Targets are stored under their own hash: a reader of an older state still finds what it was promised."""
    folder, _, name = target.path.rpartition("/")
    return f"targets/{folder}/{target.hashes['sha256']}.{name}"
