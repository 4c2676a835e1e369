"""The chain of signatures in a store, read without keys: from the first root to every target that is listed now.

Owns what must hold of each file under `metadata/`. Says which file breaks the chain, and goes on; expiry is told, not
judged. A node has python-tuf's client for this: here the store's own folder is looked at, old files included.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from tuf.api.exceptions import LengthOrHashMismatchError, RepositoryError
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

from sync.store import TIMESTAMP
from sync.store.stores import Readable
from sync.trust.repository import stored_name

_NAME: Final = re.compile(r"metadata/([1-9][0-9]*)\.([^/]+)\.json")
_KINDS: Final[Mapping[str, type]] = {"root": Root, "timestamp": Timestamp, "snapshot": Snapshot}
_MISSING: Final = "is missing"
_OLD: Final = "superseded"  # what a role is called whose delegation is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedFile:
    """A metadata file that counts now."""

    name: str
    role: str
    version: int
    expires: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A target that is signed now. `name`: of its file in the store."""

    path: str
    name: str
    target: TargetFile

    def problem(self, data: bytes) -> str | None:
        """None where `data` is what was signed."""
        try:
            self.target.verify_length_and_hashes(data)
        except LengthOrHashMismatchError as exc:
            return f"is not what was signed: {exc}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """`problems` by file name, of files that count. `keys`: every public key that was named on the way, by its id."""

    files: tuple[SignedFile, ...]
    targets: tuple[Listed, ...]
    problems: Mapping[str, str]
    keys: Mapping[str, Any]


def read_chain(store: Readable) -> Chain:
    """Follows what is signed as far as it can be read."""
    walk = _Walk(store)
    root = walk.roots()
    if root is not None:
        walk.below(root)
    return Chain(files=tuple(walk.files), targets=tuple(walk.targets), problems=walk.problems, keys=walk.keys)


def superseded(store: Readable, chain: Chain) -> dict[str, str | None]:
    """Metadata files that newer ones replaced, each with its problem or None: signed by any key that was ever named."""
    counted = {one.name for one in chain.files} | set(chain.problems)
    names = [one.name for one in store.files("metadata") if _NAME.fullmatch(one.name) and one.name not in counted]
    keys = dict(chain.keys)
    for name in names:
        old = _parse(store.read(name) or b"")
        if not isinstance(old, str) and isinstance(old.signed, Targets) and old.signed.delegations is not None:
            keys |= old.signed.delegations.keys
    return {name: _old_problem(_parse(store.read(name) or b""), keys) for name in names}


@dataclass(slots=True)
class _Walk:
    store: Readable
    files: list[SignedFile] = field(default_factory=list)
    targets: list[Listed] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)

    def roots(self) -> Root | None:
        """The newest root, if every one since the first is sound."""
        names = (_NAME.fullmatch(one.name) for one in self.store.files("metadata"))
        found = [int(match[1]) for match in names if match and match[2] == "root"]
        last: Root | None = None
        for version in range(1, max(found, default=1) + 1):
            name = f"metadata/{version}.root.json"
            metadata = self._load(name, "root")
            if metadata is None:
                return None
            root: Root = metadata.signed
            self.keys |= root.keys
            signers = [root] if last is None else [last, root]
            if not self._accept(name, "root", metadata, signers, version=version, is_listed=False):
                return None
            last = root
        return last

    def below(self, root: Root) -> None:
        """timestamp.json, the snapshot, and every role that it lists and that somebody delegates to."""
        metadata = self._load(TIMESTAMP, "timestamp")
        if metadata is None or not self._accept(TIMESTAMP, "timestamp", metadata, [root], is_listed=False):
            return
        snapshot = self._listed("snapshot", metadata.signed.snapshot_meta, root)
        if snapshot is not None:
            self._role("targets", snapshot, root, set())

    def _role(self, role: str, snapshot: Snapshot, delegator: Root | Targets, seen: set[str]) -> None:
        seen.add(role)
        meta = snapshot.meta.get(f"{role}.json")
        signed = None if meta is None else self._listed(role, meta, delegator)  # a new role has not signed yet
        if signed is None:
            return
        self.targets += [Listed(path=one.path, name=stored_name(one), target=one) for one in signed.targets.values()]
        if signed.delegations is not None:
            self.keys |= signed.delegations.keys
        for name in _delegated(signed):
            if name not in seen:
                self._role(name, snapshot, signed, seen)

    def _listed(self, role: str, meta: MetaFile, delegator: Root | Targets) -> Any:
        """What a file says that another file lists with version, length and hash; None where it does not hold."""
        name = f"metadata/{meta.version}.{role}.json"
        metadata = self._load(name, role)
        if metadata is None:
            return None
        try:
            meta.verify_length_and_hashes(self.store.read(name) or b"")
        except LengthOrHashMismatchError as exc:
            self.problems[name] = f"is not the file that is listed: {exc}"
            return None
        is_sound = self._accept(name, role, metadata, [delegator], version=meta.version, is_listed=True)
        return metadata.signed if is_sound else None

    def _load(self, name: str, role: str) -> Metadata[Any] | None:
        data = self.store.read(name)
        found = _MISSING if data is None else _parse(data)
        if not isinstance(found, str) and not isinstance(found.signed, _KINDS.get(role, Targets)):
            found = "is metadata of another role"
        if isinstance(found, str):
            self.problems[name] = found
            return None
        return found

    def _accept(
        self,
        name: str,
        role: str,
        metadata: Metadata[Any],
        signers: Iterable[Root | Targets],
        *,
        version: int | None = None,
        is_listed: bool,
    ) -> bool:
        """`is_listed`: its hash was checked, so that nothing in it can have changed."""
        problem = _signature_problem(role, metadata, signers, is_listed=is_listed)
        signed = metadata.signed
        if version is not None and signed.version != version:
            problem = f"says that it is version {signed.version}"
        if problem is not None:
            self.problems[name] = problem
            return False
        self.files.append(SignedFile(name=name, role=role, version=signed.version, expires=signed.expires))
        return True


def is_missing(problem: str) -> bool:
    return problem == _MISSING


def _delegated(signed: Targets) -> list[str]:
    roles = None if signed.delegations is None else signed.delegations.roles
    return list(roles or ())


def _parse(data: bytes) -> Metadata[Any] | str:
    try:
        return Metadata[Any].from_bytes(data)
    except RepositoryError as exc:
        return f"cannot be parsed: {exc}"


def _signature_problem(
    role: str, metadata: Metadata[Any], signers: Iterable[Root | Targets], *, is_listed: bool
) -> str | None:
    valid: set[str] = set()
    for signer in signers:
        try:
            result = signer.get_verification_result(role, metadata.signed_bytes, metadata.signatures)
        except ValueError as exc:
            return f"nobody may sign it: {exc}"
        if not result.verified:
            return f"is signed by {len(result.signed)} of the {result.threshold} keys that it needs"
        valid |= set(result.signed)
    return None if is_listed else _stray_signature(metadata, valid)


def _stray_signature(metadata: Metadata[Any], valid: set[str]) -> str | None:
    """No hash covers such a file: a signature that says nothing, or says it in another spelling, is damage."""
    for keyid, signature in metadata.signatures.items():
        if keyid not in valid or signature.signature != signature.signature.lower():
            return f"has a signature by key {keyid[:8]} that does not hold"
    return None


def _old_problem(metadata: Metadata[Any] | str, keys: Mapping[str, Any]) -> str | None:
    if isinstance(metadata, str):
        return metadata
    named = [keyid for keyid in metadata.signatures if keyid in keys]
    if not named:
        return "is signed by no key that was ever named"
    role = DelegatedRole(_OLD, named, threshold=len(named), terminating=False, paths=[])
    signer = Targets(delegations=Delegations(keys={keyid: keys[keyid] for keyid in named}, roles={_OLD: role}))
    return _signature_problem(_OLD, metadata, [signer], is_listed=False)
