"""Where the parameters lie in a file: ONNX (inside or beside the model), safetensors, GGUF, torch archives, plain.

Nothing is decoded and nothing is moved: a `Layout` only says which byte ranges of a file belong to which tensor. What
lies between them is the file's skeleton, so putting skeleton and tensors back at their offsets gives the same bytes.
A file that is not what it promises (truncated, overlapping, hostile) is laid out as one plain tensor. Readers see
headers by pread, within bounds on memory and work; one file per container.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from sync.containers import gguf, onnx, safetensors, torch, zips
from sync.containers.layout import MAX_TENSORS, Layout, Malformed, Tensor, in_order, plain
from sync.containers.source import Source

__all__ = ["Layout", "Tensor", "external_files", "read_layout"]

MAX_MODELS: Final = 64  # .onnx files in a folder that are asked about a file without a header

_Find = Callable[[Source], Iterator[Tensor]]
_BY_SUFFIX: Final[dict[str, tuple[str, _Find]]] = {
    ".onnx": ("onnx", onnx.find_tensors),
    ".safetensors": ("safetensors", safetensors.find_tensors),
}
_BY_MAGIC: Final[dict[bytes, tuple[str, _Find]]] = {
    gguf.MAGIC: ("gguf", gguf.find_tensors),
    zips.MAGIC: ("torch", torch.find_tensors),
}


def read_layout(path: Path) -> Layout:
    """The layout of a file, by the ending of its name or its first bytes. Never fails on content; `OSError` when it
    cannot be read."""
    with _opened(path) as source:
        known = _BY_SUFFIX.get(path.suffix.lower()) or _by_content(source)
        if known is not None:
            container, find = known
            try:
                return Layout(size=source.size, container=container, tensors=in_order(find(source), source.size))
            except Malformed:
                return plain(source.size)
    return _external_data(path, source.size) or plain(source.size)


def _by_content(source: Source) -> tuple[str, _Find] | None:
    """A safetensors file has no magic, but JSON behind its length."""
    start = source.fetch(0, 9, at_least=0)
    if start[:4] in _BY_MAGIC:
        return _BY_MAGIC[start[:4]]
    is_safetensors = start[8:] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= source.size - 8
    return _BY_SUFFIX[".safetensors"] if is_safetensors else None


def external_files(path: Path) -> tuple[str, ...]:
    """The files beside an ONNX model in which it keeps tensors, as it names them; none for anything else."""
    if path.suffix.lower() != ".onnx":
        return ()
    with _opened(path) as source, contextlib.suppress(Malformed):
        return tuple(dict.fromkeys(islice(onnx.external_locations(source), MAX_TENSORS)))
    return ()


def _external_data(path: Path, size: int) -> Layout | None:
    """The layout that models in the same folder give to a file; one that contradicts those before it is ignored."""
    tensors: tuple[Tensor, ...] = ()
    for model in _models_beside(path):
        try:
            with _opened(model) as source:
                found = list(islice(onnx.find_external(source, path.name, size), MAX_TENSORS))
            tensors = in_order([*tensors, *found], size)
        except (Malformed, OSError):
            continue
    return Layout(size=size, container="onnx-data", tensors=tensors) if tensors else None


def _models_beside(path: Path) -> list[Path]:
    """The model of the same name first: "model.onnx" for "model.onnx.data"."""
    models = sorted(path.parent.glob("*.onnx"), key=lambda model: (not path.name.startswith(model.stem), model.name))
    return models[:MAX_MODELS]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Source]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield Source(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
