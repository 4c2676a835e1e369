"""Everything in a store against what is signed: signatures, targets, objects, packs, and what lies beside manifests.

Only reads, and one slab at a time is in memory. Each thing that is looked at gives one `Finding`, and can be looked at
again by its name: what was published or collected meanwhile explains itself that way. Healing is `store_repair`'s.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, Literal

from common.errors import BadRelease, CorruptPack, CorruptSlab, IncompatibleRelease
from sync import codec
from sync.manifests import unpack
from sync.packs import Index, IndexFile, parse_index, read_index
from sync.release import parse_manifest, read_desired
from sync.store import index_name, object_name, pack_name
from sync.store.stores import AnyStore
from sync.trust.chain import is_missing, superseded
from sync.upkeep.pack_check import pack_problem
from sync.upkeep.stock import Stock, decoded

State = Literal["good", "damaged", "missing", "expired", "unneeded", "unchecked"]
WRONG: Final = ("damaged", "missing", "expired")

_OBJECT: Final = re.compile(r"objects/[0-9a-f]{2}/([0-9a-f]{64})\.full")
_INDEX: Final = re.compile(r"packs/([0-9a-f]{64})/([0-9a-f]{64})\.index")
_PACK: Final = re.compile(r"packs/([0-9a-f]{64})/([0-9a-f]{64})\.pack")
_TARGET: Final = re.compile(r"targets/.+/([0-9a-f]{64})\.[^/]+\.json")
_SIDE: Final = re.compile(r"(targets/.+\.json)(?:\.([0-9a-f]{16}))?\.zst")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`unneeded`: nothing that is signed names it, or it was collected. `unchecked`: what it would be checked with is
    itself damaged. `outcome`: what a repair did about it, or what is left to do."""

    kind: str  # metadata | target | manifest | side | object | index | pack
    name: str
    state: State
    problem: str = ""
    is_needed: bool = True  # False: collection takes it
    outcome: str = ""
    is_healed: bool = False

    @property
    def is_wrong(self) -> bool:
        return self.state in WRONG and not self.is_healed


class StoreCheck:
    """Looks at what is in a store, and what should be."""

    def __init__(self, store: AnyStore, stock: Stock, now: datetime) -> None:
        self._store, self._stock, self._now = store, stock, now

    def findings(self) -> Iterator[Finding]:
        """One for each thing."""
        yield from self._metadata()
        for name in self._stock.listed:
            yield self.look("manifest" if name in self._stock.releases else "target", name)
        for slab in self._stock.slabs:
            yield self.look("object", object_name(slab))
        for one in self._store.files("objects", "packs", "targets"):
            kind = kind_of(one.name)
            if kind is None or self._is_looked_at(kind, one.name):
                continue
            yield self.look(kind, one.name)
            if kind == "index":
                yield self.look("pack", pack_name(*pack_ends(one.name)))

    def look(self, kind: str, name: str) -> Finding:
        """At one thing, as it is now."""
        if kind == "metadata":
            found = {one.name: one for one in self._metadata()}
            return found.get(name, Finding(kind=kind, name=name, state="unneeded", problem="is gone"))
        looks = {
            "target": self._target,
            "manifest": self._target,
            "side": self._side,
            "object": self._object,
            "index": self._index,
            "pack": self._pack,
        }
        state, problem = looks[kind](name)
        is_needed = self._is_needed(kind, name)
        return Finding(kind=kind, name=name, state=state, problem=problem, is_needed=is_needed)

    def _is_needed(self, kind: str, name: str) -> bool:
        """By something that is signed."""
        if kind in ("index", "pack"):
            return all(self._stock.manifest_of(end) is not None for end in pack_ends(name))
        return kind not in ("target", "object") or self._is_looked_at(kind, name)

    def _is_looked_at(self, kind: str, name: str) -> bool:
        """With the manifest that names it, or with its index."""
        if kind == "object":
            return name.rpartition("/")[2].removesuffix(".full") in self._stock.slabs
        if kind == "target":
            return name in self._stock.listed
        return kind == "pack" and self._store.size(index_name(*pack_ends(name))) is not None

    def _metadata(self) -> Iterator[Finding]:
        chain = self._stock.chain
        state: State
        newest = max((one.version for one in chain.files if one.role == "root"), default=0)
        for one in chain.files:
            is_expired = one.expires <= self._now and (one.role != "root" or one.version == newest)
            problem = f"its signature held until {one.expires.isoformat()}" if is_expired else ""
            yield Finding(kind="metadata", name=one.name, state="expired" if is_expired else "good", problem=problem)
        for name, problem in chain.problems.items():
            state = "missing" if is_missing(problem) else "damaged"
            yield Finding(kind="metadata", name=name, state=state, problem=problem)
        for name, old in superseded(self._store, chain).items():
            state = "unchecked" if chain.problems else "good" if old is None else "damaged"
            yield Finding(kind="metadata", name=name, state=state, problem=old or "", is_needed=False)

    def _target(self, name: str) -> tuple[State, str]:
        listed, data = self._stock.listed.get(name), self._store.read(name)
        if listed is None:
            match = _TARGET.fullmatch(name)
            is_sound = data is None or match is None or hashlib.sha256(data).hexdigest() == match[1]
            return ("unneeded", "is not signed any more") if is_sound else ("damaged", "is not what its name says")
        if data is None:
            if name in self._stock.releases and not self._stock.is_desired(name):
                return "unneeded", "was collected"
            return "missing", "is signed, but not in the store"
        problem = listed.problem(data)
        try:
            if problem is None and name in self._stock.releases:
                parse_manifest(data, self._stock.releases[name].name)
            elif problem is None and listed.path.startswith("desired/"):
                read_desired(data, listed.path.removeprefix("desired/").removesuffix(".json"))
        except (BadRelease, IncompatibleRelease) as exc:
            problem = str(exc)
        return ("good", "") if problem is None else ("damaged", problem)

    def _side(self, name: str) -> tuple[State, str]:
        match, frame = _SIDE.fullmatch(name), self._store.read(name)
        manifest = self._stock.manifest_data(match[1]) if match else None
        base = self._stock.side_base(match[2]) if match else None
        if frame is None or manifest is None or base is None:
            return "unneeded", "leads to or from a manifest that is not here"
        try:
            is_good = unpack(frame, base, most=len(manifest)) == manifest
        except ValueError as exc:
            return "damaged", str(exc)
        return ("good", "") if is_good else ("damaged", "gives another manifest")

    def _object(self, name: str) -> tuple[State, str]:
        match = _OBJECT.fullmatch(name)
        slab = match[1] if match else ""
        entry, data = self._stock.slabs.get(slab), self._store.full(slab)
        if data is None:
            return ("unneeded", "is gone") if entry is None else ("missing", "a manifest names it")
        try:
            if entry is None:
                header, payload = codec.parse_object(data)
                codec.decode(replace(header, slab=slab), payload)
                return "unneeded", "no manifest names it"
            decoded(data, entry)
        except CorruptSlab as exc:
            return "damaged", exc.problem
        return "good", ""

    def _index(self, name: str) -> tuple[State, str]:
        found = self._read_index(*pack_ends(name))
        if found is None:
            return "unneeded", "is gone"
        return ("damaged", found) if isinstance(found, str) else ("good", "")

    def _pack(self, name: str) -> tuple[State, str]:
        ends = pack_ends(name)
        found = self._read_index(*ends)
        if found is None:
            return "unneeded", "has no index: nobody looks at it"
        if isinstance(found, str):
            return "unchecked", "its index is damaged"
        with self._store.open_pack(*ends) as file:
            if file is None:
                return "missing", "its index is here"
            problem = pack_problem(found, file, self._stock.raw)
        return ("good", "") if problem is None else ("damaged", problem)

    def _read_index(self, target: str, base: str) -> Index | IndexFile | str | None:
        """As far as it can be read: with slabs, where both manifests are here. A problem where it is damaged."""
        data = self._store.index(target, base)
        if data is None:
            return None
        try:
            found = read_index(data, base=base, target=target)
            if found is None:
                return "is of a format that is not known here"
            ends = (self._stock.manifest_of(target), self._stock.manifest_of(base))
            if ends[0] is None or ends[1] is None:
                return found
            return parse_index(data, base=ends[1], target=ends[0])
        except CorruptPack as exc:
            return exc.problem


def side_parts(name: str) -> tuple[str, str | None]:
    """Of a file beside a manifest: the manifest's file, and how the hash of the manifest starts that it leads from."""
    match = _SIDE.fullmatch(name)
    return (match[1], match[2]) if match else (name, None)


def pack_ends(name: str) -> tuple[str, str]:
    """The digests in the name of a pack or an index: to, from."""
    _, target, base = name.split("/")
    return target, base.partition(".")[0]


def kind_of(name: str) -> str | None:
    """What an unsigned file is, or a target; None for what nobody knows."""
    for kind, pattern in (
        ("object", _OBJECT),
        ("index", _INDEX),
        ("pack", _PACK),
        ("side", _SIDE),
        ("target", _TARGET),
    ):
        if pattern.fullmatch(name):
            return kind
    return None
