"""Writes what is desired now into one file: the signed files, and the slabs that a store elsewhere needs for it.

A release that would not be accepted there (expired, not whole, damaged) is not written in the first place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.clock import Clock
from common.errors import ConfigError, FetchError, TrustError
from sync import codec
from sync.packs import Index
from sync.release import Manifest
from sync.release_packs import ReleasePacks
from sync.store import index_name, object_name, pack_name
from sync.store.stores import AnyStore
from sync.transfer.carried import write
from sync.transfer.verified import FIRST_ROOT, sound_chain, verified
from sync.upkeep.catalog import Catalog

Entry = tuple[str, int, Callable[[], Iterator[bytes]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    releases: dict[str, str]
    slabs: int  # whole ones
    packs: int
    bytes: int  # of the file


def export(
    store: AnyStore,
    file: Path,
    *,
    models: Sequence[str] = (),
    version: str | None = None,
    base: str | None = None,
    clock: Clock,
) -> Exported:
    """`models`: none: every one. `version`: what has to be desired of the one model. `base`: a release of it that the
    other store has: what is in that is left out.

    Raises `ConfigError` for a wrong choice, `TrustError` or `BadRelease` where the store would not be believed.
    """
    if (version is not None or base is not None) and len(models) != 1:
        raise ConfigError("sync export", "--version, --base", f"with {len(models)} models", "exactly one --model")
    root = store.read(FIRST_ROOT)
    if root is None:
        raise TrustError(f"{store.where()} has no root metadata; create it with `outrider sync keys init`")
    chain = sound_chain(store, store.where())
    catalog = Catalog(store, chain)
    names = [one.name for one in chain.files] + [one.name for one in chain.targets if one.path.startswith("desired/")]
    content = _Content(store)
    with verified(root, _reader(store), clock) as view:
        for model in models or view.models():
            desired = view.desired(model)
            if desired is None:
                raise ConfigError("sync export", "--model", f"{model!r} is not released", ", ".join(view.models()))
            if version not in (None, desired.version):
                problem = f"{model}/{version} is not what nodes should serve, and no store can make them"
                raise ConfigError("sync export", "--version", problem, f"{desired.version}, which is signed now")
            manifest = view.manifest(desired)
            signed = [one.name for one in chain.targets if one.path == desired.manifest]
            names += [name for name in signed if store.size(name) is not None]
            content.add(manifest, None if base is None else _base(catalog, manifest, base))
    entries = [*map(content.signed, dict.fromkeys(names)), *content.entries.values()]
    size = write(file, content.releases, ((name, length, data()) for name, length, data in entries))
    return Exported(releases=content.releases, slabs=content.slabs, packs=content.packs, bytes=size)


class _Content:
    """What goes into the file beside the signed files, by name."""

    def __init__(self, store: AnyStore) -> None:
        self._store = store
        self.entries: dict[str, Entry] = {}
        self.releases: dict[str, str] = {}
        self.slabs = self.packs = 0

    def add(self, manifest: Manifest, base: Manifest | None) -> None:
        self.releases[manifest.model] = manifest.version
        left = dict(manifest.slabs())
        if base is not None:
            for slab in base.slabs():
                left.pop(slab, None)
            index = ReleasePacks(self._store).index(manifest, base)
            if index is not None:
                for entry in index.entries:
                    left.pop(entry.header.slab, None)
                self._add_pack(manifest.digest(), base.digest(), _pack_bytes(index))
        for slab, entry_ in left.items():
            name = object_name(slab)
            if name not in self.entries:
                self.slabs += 1
                size = self._store.full_bytes(slab) or 0
                self.entries[name] = (name, size, partial(self._object, slab, entry_.length))

    def signed(self, name: str) -> Entry:
        data = self._store.read(name)
        if data is None:
            raise TrustError(f"{self._store.where(name)} is missing")
        return name, len(data), lambda: iter((data,))

    def _add_pack(self, target: str, base: str, size: int) -> None:
        data = self._store.index(target, base) or b""
        name = index_name(target, base)
        self.packs += 1
        self.entries[name] = (name, len(data), lambda: iter((data,)))
        name = pack_name(target, base)
        self.entries[name] = (name, size, partial(self._pack, target, base))

    def _object(self, slab: str, length: int) -> Iterator[bytes]:
        """Not without a look at what is in it. Raises `CorruptSlab`."""
        data = self._store.full(slab) or b""
        codec.decode_object(data, slab=slab, length=length)
        yield data

    def _pack(self, target: str, base: str) -> Iterator[bytes]:
        with self._store.open_pack(target, base) as file:
            if file is None:
                raise TrustError(f"{self._store.where(pack_name(target, base))} is missing")
            while data := file.read(1 << 20):
                yield data


def _pack_bytes(index: Index) -> int:
    return sum(one.length for one in index.tables) + sum(one.header.payload_length for one in index.entries)


def _base(catalog: Catalog, manifest: Manifest, version: str) -> Manifest:
    releases = catalog.models().get(manifest.model, [])
    here = {str(one.version): one for one in releases if catalog.is_here(one)}
    if version not in here:
        accepted = ", ".join(sorted(here, key=int))
        raise ConfigError("sync export", "--base", f"{manifest.model}/{version} is not in this store", accepted)
    return catalog.manifest(here[version])


def _reader(store: AnyStore) -> Callable[[str], Iterator[bytes]]:
    """Signed files only: the shorter ways to a manifest do not travel."""

    def read(name: str) -> Iterator[bytes]:
        data = None if name.endswith(".zst") else store.read(name)
        if data is None:
            raise FetchError(name, f"is not in {store.where()}", is_permanent=True)
        yield data

    return read
