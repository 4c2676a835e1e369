"""What a store should have, as it is signed at one moment: its releases, their slabs, and proven bytes of what is here.

Only reads. Checks and repairs go by it; whatever is missing or damaged is None here, and theirs to explain.
"""

from __future__ import annotations

import contextlib
from typing import Final

from blake3 import blake3

from common.errors import BadRelease, CorruptPack, CorruptSlab
from sync import codec
from sync.packs import Index, parse_index
from sync.release import Manifest, SlabEntry
from sync.store.stores import AnyStore
from sync.trust.chain import read_chain
from sync.upkeep.catalog import Catalog, ListedRelease

_PARSED: Final = 4  # manifests in memory


class Stock:
    """`listed` and `releases` by the name of the file; `slabs`: all that some manifest names, by id."""

    def __init__(self, store: AnyStore) -> None:
        self._store, self.chain = store, read_chain(store)
        self._catalog = Catalog(store, self.chain)
        self.listed = {one.name: one for one in self.chain.targets}
        self.releases = {one.file.name: one for one in self._catalog.releases}
        self.slabs: dict[str, SlabEntry] = {}
        self._names: dict[str, str] = {}  # of manifests: by the digest of what they release
        self._hashes: dict[str, str] = {}  # and by the start of their own hash
        self._parsed: dict[str, Manifest] = {}
        for name, release in sorted(self.releases.items(), key=lambda one: one[1].version):
            self._learn(name, release)

    def manifest_of(self, digest: str) -> Manifest | None:
        """Of a release that is here and sound."""
        name = self._names.get(digest)
        if name is not None and digest not in self._parsed:
            while len(self._parsed) >= _PARSED:
                del self._parsed[next(iter(self._parsed))]
            with contextlib.suppress(BadRelease):  # it was collected since
                self._parsed[digest] = self._catalog.manifest(self.releases[name])
        return self._parsed.get(digest)

    def manifest_data(self, name: str) -> bytes | None:
        """A signed manifest's bytes, by its file; None where it is not here or not sound."""
        release = self.releases.get(name)
        try:
            return None if release is None else self._catalog.data(release.file, release.name)
        except BadRelease:
            return None

    def side_base(self, start: str | None) -> bytes | None:
        """The manifest whose hash starts so; nothing at all where there is no start."""
        if start is None:
            return b""
        name = self._hashes.get(start)
        return None if name is None else self.manifest_data(name)

    def is_desired(self, name: str) -> bool:
        """A manifest's file: some node should have that release."""
        try:
            wanted = {one.manifest for one in self._catalog.desired().values()}
        except BadRelease:
            return True
        return name in self.releases and self.releases[name].file.path in wanted

    def raw(self, slab: str) -> bytes | None:
        """The bytes of a slab, proven; None where the object is missing or damaged."""
        data, entry = self._store.full(slab), self.slabs.get(slab)
        try:
            return None if data is None or entry is None else decoded(data, entry)
        except CorruptSlab:
            return None

    def index(self, target: str, base: str) -> Index | None:
        """None where it is not here, not sound, or not between releases that are here."""
        ends = (self.manifest_of(target), self.manifest_of(base))
        data = self._store.index(target, base)
        if data is None or ends[0] is None or ends[1] is None:
            return None
        try:
            return parse_index(data, base=ends[1], target=ends[0])
        except CorruptPack:
            return None

    def _learn(self, name: str, release: ListedRelease) -> None:
        try:
            manifest, data = self._catalog.manifest(release), self._catalog.data(release.file, release.name)
        except BadRelease:
            return
        self._names[manifest.digest()] = name
        self._hashes[blake3(data).hexdigest()[:16]] = name
        self.slabs |= manifest.slabs()


def decoded(data: bytes, entry: SlabEntry) -> bytes:
    """The bytes of a slab, from the object that is its own. Raises `CorruptSlab`."""
    header, _ = codec.parse_object(data)
    if (header.width, header.mantissa) != (entry.width, entry.mantissa):
        kinds = f"({header.width}, {header.mantissa}), not ({entry.width}, {entry.mantissa})"
        raise CorruptSlab(entry.id, f"its elements are {kinds}")
    return codec.decode_object(data, slab=entry.id, length=entry.length)
