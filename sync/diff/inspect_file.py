"""What a file is to the parameter path, and what is in it: a container of tensors, an index, a slab object, a manifest.

Told by the first bytes, as a reader would; what is damaged is an error, since nobody would take it either.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common.errors import BadRelease, ConfigError, CorruptPack
from sync import codec
from sync.containers import Layout, read_layout
from sync.diff.file_release import Owners
from sync.manifests import MAX_MANIFEST_BYTES, unpack
from sync.packs import MAX_INDEX_BYTES, read_index
from sync.release import parse_manifest
from sync.slabs import MAX_SLAB_BYTES, cut

_CONTAINERS: Final = (".onnx", ".safetensors", ".gguf", ".pt", ".pth")
_ACCEPTED: Final = "ONNX, safetensors, GGUF or torch files, a pack's .index, an object's .full, a manifest"
_OURS: Final = (".index", ".full", ".pack", ".zst")
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_JSON_START: Final = b'{"mo'  # "model" comes first in a manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """`facts` about the whole, `rows` about its parts (`what` they are): both go into JSON as they are."""

    kind: str
    facts: dict[str, Any]
    what: str
    rows: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **self.facts, self.what: list(self.rows)}


def inspect_file(path: Path) -> Inspected:
    """Raises `ConfigError` for a file that is none of these, `CorruptSlab`, `CorruptPack` or `BadRelease` for a damaged
    one, `OSError` where it cannot be read."""
    with path.open("rb") as file:
        magic = file.read(4)
        size = os.fstat(file.fileno()).st_size
        if magic == b"OPIX":
            return _index(magic + file.read(MAX_INDEX_BYTES))
        if magic == b"OSLB":
            return _object(magic + file.read(codec.max_object_bytes(MAX_SLAB_BYTES)))
        if magic == _ZSTD_MAGIC:
            return _packed_manifest(path, magic + file.read(MAX_MANIFEST_BYTES))
        if magic == _JSON_START and size <= MAX_MANIFEST_BYTES:
            return _manifest(path, magic + file.read())
    if path.suffix in _OURS:
        hint = "; a pack has no structure of its own, its .index says what is in it" if path.suffix == ".pack" else ""
        problem = f"is no {path.suffix} of ours: it begins with {magic!r}{hint}"
        raise ConfigError("sync inspect", str(path), problem, _ACCEPTED)
    return _container(path, read_layout(path), size)


def _container(path: Path, layout: Layout, size: int) -> Inspected:
    cuts = cut(layout)
    owners, slabs = Owners(layout), Counter[int]()
    for one in cuts:
        slabs.update({number for number, _ in owners.of(one)})
    rows = tuple(
        {
            "name": one.name,
            "dtype": one.dtype,
            "shape": list(one.shape),
            "offset": one.offset,
            "bytes": one.length,
            "slabs": slabs[number],
        }
        for number, one in enumerate(layout.tensors)
    )
    facts: dict[str, Any] = {
        "bytes": size,
        "skeleton_bytes": sum(length for _, length in layout.skeleton()),
        "slabs": len(cuts),
    }
    if layout.container == "plain":
        is_broken = path.suffix in _CONTAINERS
        facts["note"] = f"not a sound {path.suffix[1:]} file: plain bytes" if is_broken else "plain bytes"
    return Inspected(kind=layout.container, facts=facts, what="tensors", rows=rows)


def _index(data: bytes) -> Inspected:
    index = read_index(data, base=data[20:52].hex(), target=data[52:84].hex())
    if index is None:
        raise CorruptPack(data[20:52].hex(), data[52:84].hex(), "its index has a later format than this version reads")
    tables = sum(one.length for one in index.tables)
    at, rows = tables, list[dict[str, Any]]()
    for entry in index.entries:
        form, length = int(entry["form"]), int(entry["payload_length"])
        rows.append(
            {
                "slab": int(entry["slab"]),
                "base": int(entry["base"]),
                "form": codec.FORM_NAMES.get(form, f"form {form}"),
                "row": int(entry["row"]),
                "tables": int(entry["tables"]),
                "offset": at,
                "bytes": length,
            }
        )
        at += length
    facts = {
        "base": index.base,
        "target": index.target,
        "bytes": len(data),
        "pack_bytes": index.pack_bytes,
        "table_sets": len(index.tables),
        "table_bytes": tables,
        "forms": dict(Counter(one["form"] for one in rows)),
        "note": "slabs by their numbers in the manifests of target and base, from 0",
    }
    return Inspected(kind="index", facts=facts, what="entries", rows=tuple(rows))


def _object(data: bytes) -> Inspected:
    header, _ = codec.parse_object(data)
    codec.decode_object(data, slab=header.slab, length=header.raw_length)
    facts = {
        "slab": header.slab,
        "form": header.form_name,
        "width": header.width,
        "mantissa": header.mantissa,
        "raw_bytes": header.raw_length,
        "bytes": len(data),
    }
    return Inspected(kind="object", facts=facts, what="parts", rows=())


def _packed_manifest(path: Path, frame: bytes) -> Inspected:
    try:
        data = unpack(frame)
    except ValueError as exc:
        problem = f"is compressed with zstd, and {exc} (or it was packed against another manifest)"
        raise BadRelease(str(path), problem) from exc
    return _manifest(path, data)


def _manifest(path: Path, data: bytes) -> Inspected:
    try:
        said = json.loads(data)
        name = f"{said['model']}/{said['version']}"
    except (ValueError, RecursionError, TypeError, KeyError) as exc:
        raise BadRelease(str(path), "is not a manifest") from exc
    manifest = parse_manifest(data, name)
    rows = tuple(
        {
            "path": file.path,
            "size": file.size,
            "digest": file.digest,
            "tensors": len(file.tensors),
            "slabs": len(file.slabs),
        }
        for file in manifest.files
    )
    facts = {
        "model": manifest.model,
        "version": manifest.version,
        "parent": manifest.parent,
        "digest": manifest.digest(),
        "bytes": len(data),
        "variants": [one.name for one in manifest.variants],
    }
    return Inspected(kind="manifest", facts=facts, what="files", rows=rows)
