"""What a release says: the manifest (format 1), the desired state (format 1), and which files one node needs.

Both are JSON, signed as TUF targets (how a manifest travels: `sync/manifests.py`). The release's digest is taken over
its files' names and hashes, so the same content has the same digest under whatever version it is published: that is
what a node puts in quarantine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec
from blake3 import blake3

from common.bundle import DESCRIPTION, BundleSpec, Variant, check_relative, files_of
from common.config import from_json, to_json
from common.errors import BadRelease, BundleError, ConfigError, IncompatibleRelease
from sync.codec import KINDS
from sync.manifests import MAX_MANIFEST_BYTES
from sync.slabs import MAX_SLAB_BYTES, Piece

FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabEntry:
    """A slab and where its bytes lie in the file. `key` is its place across versions."""

    id: str
    key: str
    width: int  # bytes per element
    mantissa: int  # bits below the exponent of floating-point elements; 0: integers, bytes
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        return sum(length for _, length in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """`slabs` are indices into the file's slabs, in order; a merged tensor is part of one slab."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    slabs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    path: str
    size: int
    digest: str  # BLAKE3 of the whole file
    tensors: tuple[TensorEntry, ...]
    slabs: tuple[SlabEntry, ...]  # together every byte once: skeleton ("s/..."), rows ("t/..."), merged ("m.../...")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    model: str
    version: str  # an increasing integer
    parent: str | None  # the version published before
    files: tuple[FileEntry, ...]
    shared: tuple[str, ...]  # files that every node needs
    variants: tuple[Variant, ...]  # in order of preference
    format: int = FORMAT

    @property
    def name(self) -> str:
        return f"{self.model}/{self.version}"

    def digest(self) -> str:
        """BLAKE3 over the files' names and hashes: the identity of the content."""
        lines = sorted(f"{file.digest} {file.path}\n" for file in self.files)
        return blake3("".join(lines).encode()).hexdigest()

    def slabs(self, paths: tuple[str, ...] | None = None) -> dict[str, SlabEntry]:
        """Each different slab of the files in `paths` (all, where None), by id, as it is at its first place: the same
        bytes may be of another kind at another one."""
        found: dict[str, SlabEntry] = {}
        for file in self.files:
            if paths is None or file.path in paths:
                for slab in file.slabs:
                    found.setdefault(slab.id, slab)
        return found

    def files_for(self, variant: Variant, engine: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.shared, *variant.files[engine])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """What every node should serve of one model. Epochs only grow; a version may come back under a higher one."""

    model: str
    epoch: int
    version: str
    digest: str
    manifest: str  # target path of the manifest
    manifest_hash: str  # BLAKE3 of its bytes
    format: int = FORMAT


def shared_files(spec: BundleSpec) -> tuple[str, ...]:
    """Bundle files that belong to no variant."""
    of_variants = {name for variant in spec.variants for files in variant.files.values() for name in files}
    return tuple(name for name in files_of(spec) if name not in of_variants or name == DESCRIPTION)


def manifest_path(model: str, version: str) -> str:
    return f"releases/{model}/{version}.json"


def desired_path(model: str) -> str:
    return f"desired/{model}.json"


def to_bytes(value: Manifest | Desired) -> bytes:
    """As it is signed."""
    return to_json(value)


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Raises `BadRelease` when it is malformed, `IncompatibleRelease` for a later format."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise BadRelease(name, f"its manifest has {len(data)} bytes, at most {MAX_MANIFEST_BYTES} make sense")
    manifest: Manifest = _parse(data, Manifest, name)
    if manifest.name != name:
        raise BadRelease(name, f"its manifest is that of {manifest.name}")
    check_manifest(manifest)
    return manifest


def read_manifest(data: bytes, desired: Desired) -> Manifest:
    """`parse_manifest`, and it has to be the one that the desired state names."""
    manifest = parse_manifest(data, f"{desired.model}/{desired.version}")
    if blake3(data).hexdigest() != desired.manifest_hash or manifest.digest() != desired.digest:
        raise BadRelease(manifest.name, "is not the release that the desired state names")
    return manifest


def read_desired(data: bytes, model: str) -> Desired:
    """Raises `BadRelease` when it is malformed or speaks of another model."""
    if not is_model_name(model):
        raise BadRelease(repr(model), "is not a model's name")
    desired: Desired = _parse(data, Desired, f"{model} (desired state)")
    name = f"{model}/{desired.version}"
    if desired.model != model or desired.epoch < 1 or desired.manifest != manifest_path(model, desired.version):
        raise BadRelease(name, "desired state names another model's manifest or no epoch")
    if not _is_version(desired.version):
        raise BadRelease(name, "version is not a positive integer")
    return desired


def check_manifest(manifest: Manifest) -> None:
    """Every path stays inside the release and every byte of every file comes from exactly one slab."""
    try:
        for file in manifest.files:
            check_relative(file.path, manifest.name)
    except BundleError as exc:
        raise BadRelease(manifest.name, exc.problem) from exc
    paths = [file.path for file in manifest.files]
    named = {*manifest.shared, *(name for one in manifest.variants for files in one.files.values() for name in files)}
    if len(set(paths)) != len(paths) or named - set(paths):
        raise BadRelease(manifest.name, "names a file twice, or one that it does not have")
    for file in manifest.files:
        _check_file(manifest.name, file)


def _check_file(release: str, file: FileEntry) -> None:
    for slab in file.slabs:
        is_kind = (slab.width, slab.mantissa) in KINDS and slab.length % slab.width == 0
        if not _is_id(slab.id) or not is_kind or not 0 < slab.length <= MAX_SLAB_BYTES:
            raise BadRelease(release, f"file {file.path}: slab {slab.id[:64]!r} is malformed")
    at = 0
    for offset, length in sorted(piece for slab in file.slabs for piece in slab.pieces):
        if offset != at or length <= 0:
            raise BadRelease(release, f"file {file.path}: its slabs overlap or leave bytes out")
        at += length
    if at != file.size or not _is_id(file.digest):
        raise BadRelease(release, f"file {file.path}: its slabs give {at} bytes, it should have {file.size}")


def _parse(data: bytes, kind: type[Any], name: str) -> Any:
    try:
        format_ = msgspec.json.decode(data, type=dict[str, Any]).get("format")
    except msgspec.DecodeError as exc:
        raise BadRelease(name, f"is not JSON: {exc}") from exc
    if isinstance(format_, int) and format_ > FORMAT:
        model, _, version = name.partition("/")
        raise IncompatibleRelease(model, version, f"format {format_}, this version reads format {FORMAT}")
    try:
        return from_json(data, kind, name)
    except ConfigError as exc:
        raise BadRelease(name, str(exc)) from exc


def is_model_name(text: str) -> bool:
    """Also safe as the name of a folder."""
    return 0 < len(text) <= 128 and all(c.isalnum() or c in "-_." for c in text) and not text.startswith(".")


def _is_id(text: str) -> bool:
    return len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdigit() and not text.startswith("0") and len(text) <= 18
