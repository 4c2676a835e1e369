"""Garbage collection of a store: removes what no kept release needs (`retention` says which those are), without keys.

The order is what makes a crash harmless: indexes before packs, manifests before the objects that they name, each step
durable before the next. What is cut off is taken up by the next run. A collected release stays in the signed lists
until the next publish of its model; its manifest is gone, so nobody begins to fetch it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from common.clock import Clock, SystemClock
from common.errors import BadRelease
from sync.manifests import packed_name
from sync.release import Manifest
from sync.store import StoredFile, index_name, object_name, pack_name
from sync.store.stores import AnyStore
from sync.trust.chain import read_chain
from sync.upkeep.catalog import Catalog, ListedRelease, sound_catalog
from sync.upkeep.retention import MIN_KEPT, Candidate, Pack, Plan, plan

KEEP: Final = 4
GRACE_S: Final = 3600.0  # for what a poll in progress, or a writer, may still be at

_FOLDERS: Final = ("objects", "packs", "targets", "metadata")
_OBJECT: Final = re.compile(r"objects/[0-9a-f]{2}/([0-9a-f]{64})\.full")
_PACK: Final = re.compile(r"packs/([0-9a-f]{64})/([0-9a-f]{64})\.(pack|index)")
_TARGET: Final = re.compile(r"targets/.+/[0-9a-f]{64}\.[^/]+\.json")
_SIDE: Final = re.compile(r"(targets/.+\.json)(\.[0-9a-f]{16})?\.zst")
_METADATA: Final = re.compile(r"metadata/[1-9][0-9]*\.[^/]+\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What one run did, or would do. `over_bytes`: by how much the quota is missed all the same."""

    kept: dict[str, list[int]]  # versions by model, what is desired first
    removed: dict[str, int]  # files by kind
    bytes_removed: int
    bytes_left: int
    quota_bytes: int | None
    over_bytes: int
    is_dry_run: bool


def collect(
    store: AnyStore,
    *,
    keep: int = KEEP,
    quota_bytes: int | None = None,
    is_dry_run: bool = False,
    wait_s: float = 60.0,
    clock: Clock | None = None,
) -> Collected:
    """Keeps of each model what is desired and the newest releases up to `keep` different contents, two at least.

    Raises `TrustError` or `BadRelease`, having removed nothing, where what is signed is damaged, and `StoreBusy`.
    """
    with store.lock(wait_s):
        catalog = sound_catalog(store, read_chain(store))
        held = _Inventory.of(store, (clock or SystemClock()).now().timestamp() - GRACE_S)
        candidates = [one for releases in _kept(catalog, max(keep, MIN_KEPT)) for one in held.candidates(releases)]
        disposable = sum(one.size for one in held.disposable(catalog))
        other = held.bytes - held.counted_bytes(catalog) - disposable
        chosen = plan(candidates, held.objects, held.whole_packs(), other_bytes=other, quota_bytes=quota_bytes)
        steps = list(held.steps(catalog, chosen))
        if not is_dry_run:
            _remove(store, steps)
    removed = Counter(kind for kind, files in steps for _ in files)
    gone = sum(one.size for _, files in steps for one in files)
    return Collected(
        kept=_versions(chosen),
        removed=dict(sorted(removed.items())),
        bytes_removed=gone,
        bytes_left=held.bytes - gone,
        quota_bytes=quota_bytes,
        over_bytes=0 if quota_bytes is None else max(0, held.bytes - gone - quota_bytes),
        is_dry_run=is_dry_run,
    )


Steps = list[tuple[str, list[StoredFile]]]  # kind and files, in the order of removal


def _remove(store: AnyStore, steps: Steps) -> None:
    for _, files in steps:
        for one in files:
            store.remove(one.name)
        store.sync()
    for folder in {name.rpartition("/")[0] for _, files in steps for name in (one.name for one in files)}:
        if folder.startswith("packs/"):
            store.remove_empty(folder)
    store.sync()


def _kept(catalog: Catalog, keep: int) -> Iterable[list[tuple[ListedRelease, Manifest]]]:
    """For each model its releases to keep with their manifests: what is desired, then the newest of other content."""
    desired = catalog.desired()
    for model in desired.keys() - {one.model for one in catalog.releases}:
        raise BadRelease(f"{model}/{desired[model].version}", "is desired, but no release of that model is signed")
    for model, releases in catalog.models().items():
        wanted = int(desired[model].version) if model in desired else None
        if wanted is not None and all(one.version != wanted for one in releases):
            raise BadRelease(f"{model}/{wanted}", "is desired, but no release of that name is signed")
        found: dict[str, tuple[ListedRelease, Manifest]] = {}
        for one in sorted(releases, key=lambda release: release.version != wanted):
            if len(found) == keep:
                break
            if one.version == wanted or catalog.is_here(one):
                manifest = catalog.manifest(one)
                found.setdefault(manifest.digest(), (one, manifest))
        yield list(found.values())


def _versions(chosen: Plan) -> dict[str, list[int]]:
    kept: dict[str, list[int]] = {}
    for one in sorted(chosen.releases, key=lambda release: (release.model, release.rank)):
        kept.setdefault(one.model, []).append(one.version)
    return kept


@dataclass(slots=True, kw_only=True)
class _Inventory:
    """Every file of a store, by what it is. `before`: what was modified later is not disposable yet."""

    store: AnyStore
    before: float
    bytes: int = 0
    objects: dict[str, int] = field(default_factory=dict)  # by slab
    packs: dict[Pack, int] = field(default_factory=dict)  # with their indexes
    sides: dict[str, list[StoredFile]] = field(default_factory=dict)  # by the manifest that they lead to
    signed: list[StoredFile] = field(default_factory=list)  # targets and numbered metadata
    leftovers: list[StoredFile] = field(default_factory=list)
    files: dict[str, StoredFile] = field(default_factory=dict)

    @classmethod
    def of(cls, store: AnyStore, before: float) -> _Inventory:
        found = cls(store=store, before=before)
        for one in store.files():
            found._add(one)
        return found

    def candidates(self, releases: list[tuple[ListedRelease, Manifest]]) -> Iterable[Candidate]:
        """In the order in which they are kept."""
        for rank, (one, manifest) in enumerate(releases):
            yield Candidate(
                model=one.model,
                version=one.version,
                rank=rank,
                digest=manifest.digest(),
                slabs=frozenset(manifest.slabs()),
                own_bytes=self._own_bytes(one.file.name),
            )

    def whole_packs(self) -> dict[Pack, int]:
        """Those with an index: nobody looks at the others."""
        return {pack: size for pack, size in self.packs.items() if index_name(*pack) in self.files}

    def counted_bytes(self, catalog: Catalog) -> int:
        """Of what `plan` decides about: objects, packs, the manifests of releases."""
        own = sum(self._own_bytes(one.file.name) for one in catalog.releases)
        return sum(self.objects.values()) + sum(self.packs.values()) + own

    def disposable(self, catalog: Catalog) -> list[StoredFile]:
        """Signed files that newer ones replaced, and what a crash left behind, if nobody can be at them any more."""
        live = {one.name for one in catalog.chain.files} | {one.name for one in catalog.chain.targets}
        old = [one for one, since in self._replaced() if one.name not in live and since < self.before]
        orphans = [one for name, sides in self.sides.items() if name not in live for one in sides]
        return [*old, *(one for one in (*orphans, *self.leftovers) if one.modified < self.before)]

    def _replaced(self) -> Iterable[tuple[StoredFile, float]]:
        """Each signed file, and since when a newer one is in its place; its own time where there is none."""
        places: dict[str, list[StoredFile]] = {}
        for one in sorted(self.signed, key=lambda file: file.modified):
            folder, _, name = one.name.rpartition("/")
            places.setdefault(f"{folder}/{name.partition('.')[2]}", []).append(one)
        for files in places.values():
            for one, newer in zip(files, (*files[1:], files[-1]), strict=True):
                yield one, newer.modified

    def steps(self, catalog: Catalog, chosen: Plan) -> Iterable[tuple[str, list[StoredFile]]]:
        """What to remove, in this order."""
        packs = sorted(self.packs.keys() - chosen.packs)
        yield "index", self._present(index_name(*one) for one in packs)
        yield "pack", self._present(pack_name(*one) for one in packs)
        names = {one.name: one.file.name for one in catalog.releases}
        kept = {names[f"{one.model}/{one.version}"] for one in chosen.releases}
        gone = sorted({one.file.name for one in catalog.releases} - kept)
        yield "side", [one for name in gone for one in self.sides.get(name, ())] + self._stale_sides(kept)
        yield "manifest", self._present(gone)
        yield "object", self._present(object_name(one) for one in sorted(self.objects.keys() - chosen.slabs))
        disposable = self.disposable(catalog)
        yield "superseded", [one for one in disposable if not one.is_temporary]
        yield "temporary", [one for one in disposable if one.is_temporary]

    def _stale_sides(self, kept: set[str]) -> list[StoredFile]:
        """Ways to a kept manifest from one that is not."""
        wanted = set()
        bases = [b"", *(self.store.read(name) or b"" for name in sorted(kept))]
        for name in kept:
            wanted |= {packed_name(name, base) for base in bases}
        return [one for name in sorted(kept) for one in self.sides.get(name, ()) if one.name not in wanted]

    def _present(self, names: Iterable[str]) -> list[StoredFile]:
        return [self.files[name] for name in names if name in self.files]

    def _own_bytes(self, name: str) -> int:
        manifest = self.files.get(name)
        return sum(one.size for one in self.sides.get(name, ())) + (manifest.size if manifest else 0)

    def _add(self, one: StoredFile) -> None:
        self.bytes += one.size
        self.files[one.name] = one
        if one.is_temporary:
            if one.name.partition("/")[0] in _FOLDERS:
                self.leftovers.append(one)
        elif match := _OBJECT.fullmatch(one.name):
            self.objects[match[1]] = one.size
        elif match := _PACK.fullmatch(one.name):
            key = (match[1], match[2])
            self.packs[key] = self.packs.get(key, 0) + one.size
        elif match := _SIDE.fullmatch(one.name):
            self.sides.setdefault(match[1], []).append(one)
        elif _TARGET.fullmatch(one.name) or _METADATA.fullmatch(one.name):
            self.signed.append(one)
