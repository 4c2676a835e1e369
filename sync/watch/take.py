"""Brings one checkpoint here, whole: copied, its header read, shards put together into one file.

Owns the file that a build reads. It has one name whatever the trainer calls its checkpoints: what has the same content
is then the same source.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from common.errors import CheckpointRefused
from sync.containers import external_files, read_layout
from sync.slabs import file_digest
from sync.watch.places import Place
from sync.watch.watch import Checkpoint, Look

_CONTAINERS: Final = {".safetensors": "safetensors", ".onnx": "onnx"}
_LENGTH: Final = struct.Struct("<Q")


def take(place: Place, look: Look, checkpoint: Checkpoint, to: Path) -> str:
    """Copies it to `to` and returns the BLAKE3 (hex) of what is there then.

    Raises `CheckpointRefused` when it is not whole or does not stand still; `to` is then what it was.
    """
    if checkpoint.problem:
        raise CheckpointRefused(checkpoint.name, checkpoint.problem)
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".taking-", dir=to.parent) as folder:
        copies = []
        for number, name in enumerate(checkpoint.files):
            copies.append(Path(folder) / f"{number}{to.suffix}")
            place.copy(name, look[name], copies[-1])
            _check(name, copies[-1])
        whole = copies[0] if len(copies) == 1 else _merged(checkpoint, copies, Path(folder) / f"whole{to.suffix}")
        with whole.open("rb") as file:
            digest, _ = file_digest(file.fileno())
        whole.replace(to)
    return digest


def _check(name: str, path: Path) -> None:
    """By its header: that is where a file says how long it is."""
    wanted = _CONTAINERS[path.suffix]
    if read_layout(path).container != wanted:
        raise CheckpointRefused(name, f"is no whole {wanted} file: cut off, still being written, or something else")
    if external_files(path):
        raise CheckpointRefused(name, "keeps its tensors in other files; accepted: one file with all of them")


def _merged(checkpoint: Checkpoint, shards: Sequence[Path], out: Path) -> Path:
    """One safetensors file with the tensors of all shards, in their order; tensors are copied as they are."""
    if out.suffix != ".safetensors":
        raise CheckpointRefused(checkpoint.name, "is in several files, which only safetensors can be")
    header: dict[str, Any] = {}
    at = 0
    parts = []
    for path in shards:
        start, entries = _header(path)
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            if name in header:
                raise CheckpointRefused(checkpoint.name, f"has tensor {name!r} in two files")
            header[name] = entry | {"data_offsets": [one + at for one in entry["data_offsets"]]}
        parts.append((path, start))
        at += path.stat().st_size - start
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    with out.open("wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for path, start in parts:
            with path.open("rb") as shard:
                shard.seek(start)
                shutil.copyfileobj(shard, file, 1 << 20)
    return out


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and what the header says; the layout was read before, so it is sound."""
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        entries: dict[str, Any] = json.loads(file.read(length))
    return _LENGTH.size + length, entries
