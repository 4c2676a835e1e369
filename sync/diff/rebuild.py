"""A file from its predecessor and what was fetched, alone: `outrider sync diff --apply`.

Slab by slab, none kept, every byte proven before the file has its name: payload hashes, slab ids, at last the BLAKE3 of
the whole file. What is damaged is refused; there is nowhere to fetch it again from.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from common.errors import BadRelease, CorruptPack, CorruptSlab
from sync import codec
from sync.diff.file_release import MODEL, FileRelease
from sync.disk import sync_folder
from sync.manifests import unpack
from sync.packs import Entry, Index, parse_index
from sync.release import FileEntry, Manifest, SlabEntry, parse_manifest, to_bytes
from sync.slabs import file_digest, write_pieces
from sync.store import Store, pack_name


def rebuild(base: FileRelease, manifest: bytes, fetched: Store, out: Path) -> None:
    """Writes `out` whole or not at all. `manifest`: as it travels to whoever has that of `base`. `fetched`: the pack
    from `base`, its index, the slabs that stand alone.

    Raises `CorruptSlab`, `CorruptPack` or `BadRelease` where what was fetched does not prove to be what the manifest
    names, `FileChanged` where the base is not what it was, and `OSError`.
    """
    name = f"{MODEL}/{int(base.manifest.version) + 1}"
    try:
        target = parse_manifest(unpack(manifest, to_bytes(base.manifest)), name)
    except ValueError as exc:
        raise BadRelease(name, f"its manifest {exc}") from exc
    (file,) = target.files
    slabs = _Slabs(base, fetched, target)
    with _replaced(out) as fd:
        os.ftruncate(fd, file.size)
        for slab in file.slabs:
            write_pieces(fd, slab.pieces, slabs.read(slab))
        _check(fd, file, target.name)


class _Slabs:
    """The slabs of the new file: from the base, from the pack, or alone."""

    def __init__(self, base: FileRelease, fetched: Store, target: Manifest) -> None:
        self._base, self._fetched = base, fetched
        self._here = base.manifest.slabs()
        self._target, self._name = target, (base.manifest.digest(), target.digest())
        self._index = self._read_index()
        self._entries = {} if self._index is None else _smallest(self._index)
        self._tables: dict[int, codec.TableSet] = {}

    def read(self, slab: SlabEntry) -> bytes:
        if slab.id in self._here:
            return self._base.read(self._here[slab.id])
        entry = self._entries.get(slab.id)
        if entry is None:
            data = self._fetched.full(slab.id)
            if data is None:
                raise CorruptSlab(slab.id, "is neither in the base nor in what was fetched")
            return codec.decode_object(data, slab=slab.id, length=slab.length)
        header = entry.header
        base = None if header.base is None or header.base not in self._here else self._here[header.base]
        return codec.decode(
            header,
            self._part(entry.offset, header.payload_length),
            base=None if base is None else self._base.read(base),
            tables=self._table(header.tables) if header.form == codec.CTX else None,
        )

    def _read_index(self) -> Index | None:
        base, target = self._name
        data = self._fetched.index(target, base)
        return None if data is None else parse_index(data, base=self._base.manifest, target=self._target)

    def _table(self, number: int) -> codec.TableSet:
        if number not in self._tables:
            assert self._index is not None  # it has the entry that asks
            one = self._index.tables[number]
            data = self._part(one.offset, one.length)
            if codec.payload_hash(data) != one.digest:
                raise CorruptPack(*self._name, f"hash of table set {number} does not match")
            self._tables[number] = codec.parse_tables(data)
        return self._tables[number]

    def _part(self, offset: int, length: int) -> bytes:
        base, target = self._name
        found = self._fetched.part(pack_name(target, base), offset, length) if length else (0, b"")
        if found is None or len(found[1]) != length:
            raise CorruptPack(base, target, f"the pack does not have {length} bytes at {offset}")
        return found[1]


def _smallest(index: Index) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for one in index.entries:
        before = entries.setdefault(one.header.slab, one)
        if one.header.form in codec.FORM_NAMES and one.header.payload_length < before.header.payload_length:
            entries[one.header.slab] = one
    return entries


def _check(fd: int, file: FileEntry, release: str) -> None:
    if file_digest(fd)[0] != file.digest:
        raise BadRelease(release, "its slabs do not give the hash that the manifest declares")


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[int]:
    """A file to write and read, which takes its name, durably, when the block has ended well."""
    temporary = path.parent / f".tmp-{secrets.token_hex(8)}"
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as exc:  # a full disk does not say which file it was
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(exc.errno, exc.strerror, str(path)) from exc
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
