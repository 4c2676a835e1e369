"""The publisher's side of TUF: signs releases and desired state, and moves a whole new state in at once.

Roles: `targets` signs manifests (``releases/*/*``) and delegates ``desired/*`` to the online role `desired`. Snapshots
are consistent (every file but timestamp.json carries its version in its name), so a reader sees the old state or the
new one; timestamp.json is replaced last.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from sync.store import TIMESTAMP, Store
from sync.trust.keys import DESIRED, Keys

T = TypeVar("T", Root, Targets, Snapshot, Timestamp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """For how long a signature of each role is good, in days. Online roles are signed again after a third of it."""

    root: float = 3650.0
    targets: float = 365.0
    desired: float = 90.0
    snapshot: float = 14.0
    timestamp: float = 3.0

    def of(self, role: str) -> timedelta:
        return timedelta(days=float(getattr(self, role)))


class Repository:
    """Signed metadata in a store. Callers hold the store's lock around whatever changes it."""

    def __init__(self, store: Store, keys: Keys, *, lives: Lives | None = None, clock: Clock | None = None) -> None:
        self._store, self._keys = store, keys
        self._lives, self._clock = lives or Lives(), clock or SystemClock()

    def create(self) -> bytes:
        """Signs the first root and empty metadata. Returns the root, which nodes are given to begin with."""
        if self._store.read(TIMESTAMP) is not None:
            raise TrustError(f"{self._store.root} has signed metadata already")
        root = Root(expires=self._expiry("root"), consistent_snapshot=True)
        for role in ("root", "targets", "snapshot", "timestamp"):
            root.add_key(self._keys.signer(role).public_key, role)
        data = self._sign("root", root)
        self._store.replace("metadata/1.root.json", data)
        self._move_in(self._first_targets(), Targets(expires=self._expiry(DESIRED)), Snapshot(), Timestamp())
        return data

    def root(self) -> bytes:
        """The first root: what a node trusts before it has heard anything."""
        data = self._store.read("metadata/1.root.json")
        if data is None:
            raise TrustError(f"{self._store.root} has no root metadata; create it with `outrider sync keys init`")
        return data

    def signed(self) -> dict[str, Root | Targets | Snapshot | Timestamp]:
        """What is signed now, by role; the newest root."""
        version = 1
        while self._store.read(f"metadata/{version + 1}.root.json") is not None:
            version += 1
        return {
            "root": self._parse(f"metadata/{version}.root.json", Root),
            "targets": self._targets("targets"),
            "snapshot": self._snapshot(),
            "timestamp": self._timestamp(),
            DESIRED: self._targets(DESIRED),
        }

    def target(self, path: str) -> bytes | None:
        """The newest content of a target, manifest or desired state."""
        name = self.target_name(path)
        return None if name is None else self._store.read(name)

    def target_name(self, path: str) -> str | None:
        """Under which name the store has it."""
        role = self._targets(DESIRED if path.startswith("desired/") else "targets")
        target = role.targets.get(path)
        return None if target is None else stored_name(target)

    def add(self, releases: Mapping[str, bytes], desired: Mapping[str, bytes]) -> None:
        """Signs new manifests and new desired states together: readers see all of them or none."""
        targets, online = self._targets("targets"), self._targets(DESIRED)
        for role, contents in ((targets, releases), (online, desired)):
            for path, data in contents.items():
                target = TargetFile.from_data(path, data, ["sha256"])
                role.targets[path] = target
                self._store.replace(stored_name(target), data)
        targets.version += 1
        online.version += 1
        targets.expires, online.expires = self._expiry("targets"), self._expiry(DESIRED)
        self._move_in(targets, online, self._snapshot(), self._timestamp())

    def renew(self) -> bool:
        """Signs the online roles again when a third of one's life is over. False when nothing was due."""
        now = self._clock.now()
        online, snapshot = self._targets(DESIRED), self._snapshot()
        timestamp = self._timestamp()
        is_desired_due = self._is_due(DESIRED, online.expires, now)
        is_due = self._is_due("snapshot", snapshot.expires, now) or self._is_due("timestamp", timestamp.expires, now)
        if not is_desired_due and not is_due:
            return False
        if is_desired_due:
            online.version += 1
            online.expires = self._expiry(DESIRED)
        self._move_in(None, online if is_desired_due else None, snapshot, timestamp)
        return True

    def _is_due(self, role: str, expires: datetime, now: datetime) -> bool:
        return expires - now < self._lives.of(role) * 2 / 3

    def _first_targets(self) -> Targets:
        targets = Targets(expires=self._expiry("targets"))
        online = DelegatedRole(DESIRED, [], threshold=1, terminating=True, paths=["desired/*"])
        targets.delegations = Delegations(keys={}, roles={DESIRED: online})
        targets.add_key(self._keys.signer(DESIRED).public_key, DESIRED)
        return targets

    def _move_in(
        self, targets: Targets | None, online: Targets | None, snapshot: Snapshot, timestamp: Timestamp
    ) -> None:
        """Writes what is new from the bottom up; readers follow it once timestamp.json is there."""
        for role, signed in (("targets", targets), (DESIRED, online)):
            if signed is not None:
                data = self._sign(role, signed)
                self._store.replace(f"metadata/{signed.version}.{role}.json", data)
                snapshot.meta[f"{role}.json"] = MetaFile.from_data(signed.version, data, ["sha256"])
        snapshot.version = timestamp.snapshot_meta.version + 1
        snapshot.expires, timestamp.expires = self._expiry("snapshot"), self._expiry("timestamp")
        data = self._sign("snapshot", snapshot)
        self._store.replace(f"metadata/{snapshot.version}.snapshot.json", data)
        timestamp.snapshot_meta = MetaFile.from_data(snapshot.version, data, ["sha256"])
        timestamp.version += 1
        self._store.sync()
        self._store.replace(TIMESTAMP, self._sign("timestamp", timestamp))
        self._store.sync()

    def _timestamp(self) -> Timestamp:
        return self._parse(TIMESTAMP, Timestamp)

    def _snapshot(self) -> Snapshot:
        return self._parse(f"metadata/{self._timestamp().snapshot_meta.version}.snapshot.json", Snapshot)

    def _targets(self, role: str) -> Targets:
        return self._parse(f"metadata/{self._snapshot().meta[f'{role}.json'].version}.{role}.json", Targets)

    def _parse(self, name: str, kind: type[T]) -> T:
        data = self._store.read(name)
        if data is None:
            raise TrustError(f"{self._store.root / name} is missing; create metadata with `outrider sync keys init`")
        try:
            signed = Metadata[Any].from_bytes(data).signed
        except RepositoryError as exc:
            raise TrustError(f"{self._store.root / name} cannot be parsed: {exc}") from exc
        if not isinstance(signed, kind):
            raise TrustError(f"{self._store.root / name} is metadata of another role")
        return signed

    def _sign(self, role: str, signed: Any) -> bytes:
        metadata = Metadata(signed)
        metadata.sign(self._keys.signer(role))
        return metadata.to_bytes()

    def _expiry(self, role: str) -> datetime:
        return self._clock.now() + self._lives.of(role)


def stored_name(target: TargetFile) -> str:
    """Targets are stored under their own hash: a reader of an older state still finds what it was promised."""
    folder, _, name = target.path.rpartition("/")
    return f"targets/{folder}/{target.hashes['sha256']}.{name}"
