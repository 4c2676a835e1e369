"""Torch checkpoints: the zip archive that `torch.save` writes, one stored member per storage, without torch.

    archive/data.pkl     what the tensors are: read as far as `pickles` follows it, never run
    archive/data/0 ...   the storages

A storage is laid out once, however many tensors view it: in the shape of the first one that covers it, otherwise as one
row of its elements. A storage of which nothing is known is bytes. Compressed members stay in the skeleton.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from sync.containers import zips
from sync.containers.kinds import KINDS
from sync.containers.layout import MAX_DIMS, Malformed, Tensor, declared
from sync.containers.pickles import MAX_PICKLE_BYTES, Storage, Unreadable, View, read_views
from sync.containers.source import Source

_PICKLE: Final = "data.pkl"
_STORAGES: Final = {
    "torch.DoubleStorage": "float64", "torch.FloatStorage": "float32", "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16", "torch.LongStorage": "int64", "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16", "torch.CharStorage": "int8", "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool", "torch.ComplexFloatStorage": "complex64", "torch.ComplexDoubleStorage": "complex128",
    "torch.QInt8Storage": "int8", "torch.QUInt8Storage": "uint8", "torch.QInt32Storage": "int32",
}  # fmt: skip

_Views = dict[str, list[tuple[str, View]]]  # storage key -> its tensors, with their names


def find_tensors(source: Source) -> Iterator[Tensor]:
    members = zips.members(source)
    pickle = next((one for one in members if one.name == _PICKLE or one.name.endswith("/" + _PICKLE)), None)
    if pickle is None:
        raise Malformed
    folder = pickle.name.removesuffix(_PICKLE) + "data/"
    found = [one for one in members if one.is_stored and one.name.startswith(folder)]
    if not found:
        raise Malformed
    storages, views = _described(source, pickle)
    for member in found:
        key = member.name.removeprefix(folder)
        offset = zips.data_offset(source, member)
        yield _tensor(key, storages.get(key), views.get(key, []), offset, member.length)


def _described(source: Source, pickle: zips.Member) -> tuple[dict[str, Storage], _Views]:
    """What the pickle says; nothing where it cannot be read."""
    if not pickle.is_stored or pickle.length > MAX_PICKLE_BYTES:
        return {}, {}
    try:
        storages, tensors = read_views(source.fetch(zips.data_offset(source, pickle), pickle.length))
    except Unreadable:
        return {}, {}
    views: _Views = {}
    for name, view in tensors:
        views.setdefault(view.storage.key, []).append((name, view))
    return storages, views


def _tensor(key: str, storage: Storage | None, views: list[tuple[str, View]], offset: int, length: int) -> Tensor:
    name = views[0][0] if views and views[0][0] else f"data/{key}"
    dtype = next((view.dtype.removeprefix("torch.") for _, view in views if view.dtype is not None), None)
    if dtype is None and storage is not None:
        dtype = _STORAGES.get(storage.kind)
    if dtype is None or dtype not in KINDS:
        return declared(name, None, (), offset, length)
    elements = length * KINDS[dtype].block // KINDS[dtype].block_bytes
    shapes = (_covering(view, elements) for _, view in views)
    shape = next((shape for shape in shapes if shape is not None), (elements,))
    return declared(name, dtype, shape, offset, length)


def _covering(view: View, elements: int) -> tuple[int, ...] | None:
    """The shape in which the storage itself lies, where the tensor is all of it: a transposed one is turned back."""
    if view.offset or len(view.size) > MAX_DIMS or math.prod(view.size) != elements:
        return None
    axes = sorted(range(len(view.size)), key=lambda axis: -view.stride[axis])
    step = 1
    for axis in reversed(axes):
        if view.size[axis] != 1 and view.stride[axis] != step:
            return None
        step *= view.size[axis]
    return tuple(view.size[axis] for axis in axes)
