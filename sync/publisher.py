"""From a bundle folder to a signed release: cut, store what is new, pack the differences, sign, move in.

Slabs that the store has are not written again. Each new slab gets a `full` object; its differences to the slab at the
same place go into one pack for each of the last `bases` releases: two, so that a node that refused the last release
still gets the next one as a difference to what it serves. Releases that were collected (`collect`) leave the signed
lists here, where the keys are.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3
from tuf.api.metadata import TargetFile

from common.bundle import Bundle, files_of
from common.clock import Clock
from common.errors import BadRelease, BundleError, CorruptSlab, IncompatibleRelease
from sync import codec
from sync.containers import Tensor
from sync.manifests import pack, packed_name
from sync.release import (
    Desired,
    FileEntry,
    Manifest,
    SlabEntry,
    TensorEntry,
    check_manifest,
    desired_path,
    manifest_path,
    parse_manifest,
    read_desired,
    shared_files,
    to_bytes,
)
from sync.release_packs import ReleasePacks, Source
from sync.slabs import Cut, file_digest, read_pieces, slab_id
from sync.store.stores import AnyStore
from sync.trust.keys import Keys
from sync.trust.repository import Lives, Repository, stored_name

DELTA_BASES: Final = 2
MAX_BASES: Final = 64
_SAME: Final = 8  # releases that are looked at for each base: some may be of the same content


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What `publish` did. Bytes are those of a whole release, all variants: a node fetches its variant's files only."""

    model: str
    version: str
    epoch: int
    digest: str
    is_new: bool  # False: the same content is what is desired already
    slabs: int
    slabs_new: int  # not in the release before
    bytes_raw: int
    bytes_full: int  # every slab as `full`: what a node with nothing fetches
    bytes_delta: int  # what a node with the release before fetches: payloads, table sets, index
    bytes_by_form: Mapping[str, int]  # the same, by form
    bytes_manifest: int  # which a node with the release before fetches beside that


class Publisher:
    """Writes releases into a store. Several may run at once: the store's lock makes them take turns."""

    def __init__(
        self,
        store: AnyStore,
        keys: Keys,
        *,
        bases: int = DELTA_BASES,
        lives: Lives | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`bases`: releases of other content, the newest, that a new one is packed against (0..`MAX_BASES`)."""
        self._store, self._packs, self._bases = store, ReleasePacks(store), bases
        self._repository = Repository(store, keys, lives=lives, clock=clock)

    def publish(self, folder: Path, *, force: bool = False, wait_s: float = 60.0) -> Published:
        """Makes the bundle in `folder` the desired version of its model. Identical content is a no-op unless `force`,
        which also checks every object that the store has already, and mends what is damaged.

        Raises `BundleError` (folder incomplete), `StoreBusy` (lock not free within `wait_s`), `TrustError` (keys).
        """
        bundle = Bundle.open(folder)
        files = {name: bundle.file(name) for name in files_of(bundle.spec)}
        for name, path in files.items():
            if not path.is_file():
                raise BundleError(str(folder), f"file {name!r} is missing")
        with self._store.lock(wait_s):
            return self._publish(bundle, files, force)

    def current(self, model: str) -> Desired | None:
        """The desired state that is signed now."""
        data = self._repository.target(desired_path(model))
        return None if data is None else read_desired(data, model)

    def manifest(self, model: str, version: str) -> Manifest | None:
        """A release's manifest, from this publisher's own store; None where it is not signed, or was collected."""
        data = self._repository.target(manifest_path(model, version))
        return None if data is None else parse_manifest(data, f"{model}/{version}")

    def _publish(self, bundle: Bundle, files: dict[str, Path], force: bool) -> Published:
        model = bundle.spec.model.name
        current, listed = self.current(model), self._listed(model)
        history = self._history(model, current, listed)
        sources = {name: Source.of(name, path) for name, path in files.items()}
        entries = tuple(self._store_file(source, heals=force) for source in sources.values())
        manifest = Manifest(
            model=model,
            version=str(1 + max(listed, default=0)),
            parent=history[0].version if history else None,
            files=entries,
            shared=shared_files(bundle.spec),
            variants=bundle.spec.variants,
        )
        check_manifest(manifest)
        is_here = current is not None and bool(history) and history[0].version == current.version
        if current is not None and is_here and manifest.digest() == current.digest and not force:
            return self._report(history[0], current, history[0], is_new=False)
        for base in self._others(history, manifest):
            self._packs.write(manifest, base, sources, heals=force)
        epoch = 1 if current is None else current.epoch + 1
        desired = self._sign(manifest, epoch, history[: self._bases], self._collected(model, listed))
        return self._report(manifest, desired, history[0] if history else None, is_new=True)

    def _listed(self, model: str) -> dict[int, str]:
        """Every version that is signed, collected ones too, and the file of its manifest."""
        start = manifest_path(model, "").removesuffix(".json")
        found = self._repository.listed(start).items()
        versions = {path.removeprefix(start).removesuffix(".json"): name for path, name in found}
        return {int(version): name for version, name in versions.items() if version.isdecimal()}

    def _collected(self, model: str, listed: Mapping[int, str]) -> list[str]:
        """What need not be listed any more: a higher version is signed with it, so no number is given twice."""
        gone = (version for version, name in listed.items() if self._store.size(name) is None)
        return [manifest_path(model, str(version)) for version in gone]

    def _sign(self, manifest: Manifest, epoch: int, before: list[Manifest], collected: Collection[str]) -> Desired:
        """`before`: releases whose manifests nodes are likely to have."""
        data = to_bytes(manifest)
        desired = Desired(
            model=manifest.model,
            epoch=epoch,
            version=manifest.version,
            digest=manifest.digest(),
            manifest=manifest_path(manifest.model, manifest.version),
            manifest_hash=blake3(data).hexdigest(),
        )
        name = stored_name(TargetFile.from_data(desired.manifest, data, ["sha256"]))
        for base in (b"", *(self._signed_manifest(one) for one in before)):
            self._store.replace(packed_name(name, base), pack(data, base))
        signed = {desired.manifest: data}, {desired_path(manifest.model): to_bytes(desired)}
        self._repository.add(*signed, dropped=collected)
        return desired

    def _signed_manifest(self, manifest: Manifest) -> bytes:
        return self._repository.target(manifest_path(manifest.model, manifest.version)) or b""

    def _manifest_bytes(self, desired: Desired, parent: Manifest | None) -> int:
        """As it travels to a node that has the parent."""
        name = self._repository.target_name(desired.manifest) or ""
        base = b"" if parent is None else self._signed_manifest(parent)
        return len(self._store.read(packed_name(name, base)) or self._store.read(packed_name(name)) or b"")

    def _history(self, model: str, current: Desired | None, listed: Mapping[int, str]) -> list[Manifest]:
        """The releases that are here and sound: what is desired, then the newest, until enough different ones are among
        them."""
        wanted = 0 if current is None else int(current.version)
        versions = sorted(listed, key=lambda number: (number != wanted, -number))
        history: list[Manifest] = []
        for version in versions[: _SAME * max(1, self._bases)]:
            manifest = self._sound_manifest(model, version, listed[version])
            if manifest is None:
                continue
            history.append(manifest)
            if len({one.digest() for one in history}) > self._bases:
                break
        return history

    def _sound_manifest(self, model: str, version: int, file: str) -> Manifest | None:
        """None where it was collected, or is damaged: then it is no base, that is all."""
        data = self._store.read(file)
        if data is None or hashlib.sha256(data).hexdigest() != file.rpartition("/")[2].partition(".")[0]:
            return None
        try:
            return parse_manifest(data, f"{model}/{version}")
        except (BadRelease, IncompatibleRelease):
            return None

    def _others(self, history: list[Manifest], manifest: Manifest) -> list[Manifest]:
        """The last `bases` releases of other content than `manifest`, each content once, newest first."""
        different: dict[str, Manifest] = {}
        for one in history:
            different.setdefault(one.digest(), one)
        different.pop(manifest.digest(), None)
        return list(different.values())[: self._bases]

    def _store_file(self, source: Source, *, heals: bool) -> FileEntry:
        with source.opened() as fd:
            before = os.fstat(fd)
            slabs = self._store_slabs(fd, source.cuts, heals=heals)
            digest, size = file_digest(fd)
            after = os.fstat(fd)
        if size != source.layout.size or before.st_mtime_ns != after.st_mtime_ns:
            raise source.changed()
        tensors = tuple(_entry(tensor, indices) for tensor, indices in _slabs_of(source.layout.tensors, source.cuts))
        return FileEntry(path=source.name, size=size, digest=digest, tensors=tensors, slabs=slabs)

    def _store_slabs(self, fd: int, cuts: Sequence[Cut], *, heals: bool) -> tuple[SlabEntry, ...]:
        """In the order of `cuts`, as many at a time as the store likes. The first failure ends it."""
        if self._store.writers == 1:
            return tuple(self._store_slab(fd, one, heals=heals) for one in cuts)
        with ThreadPoolExecutor(self._store.writers, thread_name_prefix="sync-publish") as pool:
            pending = [pool.submit(self._store_slab, fd, one, heals=heals) for one in cuts]
            try:
                return tuple(one.result() for one in pending)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _store_slab(self, fd: int, place: Cut, *, heals: bool) -> SlabEntry:
        """`heals`: an object that the store has is read, and written anew where it is damaged."""
        raw = read_pieces(fd, place.pieces)
        slab = slab_id(raw)
        full = self._store.full_bytes(slab)
        if full is not None and heals and not self._is_sound(slab, len(raw)):
            self._store.drop_full(slab)
            full = None
        if full is None:
            self._store.put_full(slab, codec.encode_full(raw, place.width, place.mantissa).to_object())
        return SlabEntry(id=slab, key=place.key, width=place.width, mantissa=place.mantissa, pieces=place.pieces)

    def _is_sound(self, slab: str, length: int) -> bool:
        data = self._store.full(slab)
        try:
            return data is not None and bool(codec.decode_object(data, slab=slab, length=length))
        except CorruptSlab:
            return False

    def _report(self, manifest: Manifest, desired: Desired, parent: Manifest | None, *, is_new: bool) -> Published:
        slabs = manifest.slabs()
        known = {} if parent is None else parent.slabs()
        new = [slab for slab in slabs if slab not in known]
        forms = self._packs.cost(new, manifest, parent)
        return Published(
            model=manifest.model,
            version=manifest.version,
            epoch=desired.epoch,
            digest=desired.digest,
            is_new=is_new,
            slabs=len(slabs),
            slabs_new=len(new),
            bytes_raw=sum(slab.length for slab in slabs.values()),
            bytes_full=sum(self._store.full_bytes(slab) or 0 for slab in slabs),
            bytes_delta=sum(forms.values()),
            bytes_by_form=forms,
            bytes_manifest=self._manifest_bytes(desired, parent),
        )


def _slabs_of(tensors: tuple[Tensor, ...], cuts: tuple[Cut, ...]) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Each tensor with the indices of the slabs that hold its bytes, in order."""
    starts = {tensor.offset: tensor for tensor in tensors}
    found: dict[int, list[int]] = {tensor.offset: [] for tensor in tensors}
    for index, one in enumerate(cuts):
        if one.key.startswith("s/"):
            continue
        for offset, _ in one.pieces:
            if offset in starts:
                owner = offset
            found[owner].append(index)
    return ((tensor, tuple(found[tensor.offset])) for tensor in tensors)


def _entry(tensor: Tensor, slabs: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, offset=tensor.offset, slabs=slabs)
