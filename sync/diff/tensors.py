"""The costs of a difference by tensor: what changed, in which forms it travels, how many bytes, and the limit."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from sync.containers import Tensor
from sync.diff.file_release import NOBODY, FileRelease, Owners
from sync.diff.limit import Limit, limit_of_new, limit_of_step
from sync.slabs import Cut

SKELETON: Final = "(skeleton)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabCost:
    """What is fetched for one slab. `tables`: number of the table set, for `ctx`."""

    form: str
    bytes: int
    tables: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCost:
    """`changed`: share of the words that differ, None where the base has no such tensor. `payload_bytes`: of its slabs;
    of one that tensors share, by their share of it. `bound_bytes`: the limit, 0 where nothing is fetched."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    changed: float | None
    forms: tuple[str, ...]  # most of it first
    payload_bytes: float
    bound_bytes: float


def tensor_costs(base: FileRelease, new: FileRelease, costs: Mapping[str, SlabCost]) -> tuple[TensorCost, ...]:
    """In order of position, then the bytes that belong to no tensor. `costs`: of the slabs that are fetched, by id."""
    payload, forms = _shares(new, costs)
    before = {_identity(one): one for one in reversed(base.layout.tensors)}

    def limit_of(tensor: Tensor) -> Limit:
        return _tensor_limit(base, new, before.get(_identity(tensor)), tensor)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="limit") as pool:
        limits = list(pool.map(limit_of, new.layout.tensors))
    rows = [(*_identity(one), one.length, limit) for one, limit in zip(new.layout.tensors, limits, strict=True)]
    places = [*range(len(rows))]
    if skeleton := sum(length for _, length in new.layout.skeleton()):
        rows.append((SKELETON, "bytes", (skeleton,), skeleton, _skeleton_limit(base, new)))
        places.append(NOBODY)
    return tuple(
        TensorCost(
            name=name,
            dtype=dtype,
            shape=shape,
            raw_bytes=length,
            changed=limit.changed,
            forms=tuple(form for form, _ in forms[place].most_common()),
            payload_bytes=payload[place],
            bound_bytes=limit.bits / 8 if payload[place] else 0.0,
        )
        for place, (name, dtype, shape, length, limit) in zip(places, rows, strict=True)
    )


def _identity(tensor: Tensor) -> tuple[str, str, tuple[int, ...]]:
    return tensor.name, tensor.dtype, tensor.shape


def _shares(new: FileRelease, costs: Mapping[str, SlabCost]) -> tuple[dict[int, float], dict[int, Counter[str]]]:
    """Bytes by tensor, and raw bytes by tensor and form. A slab that is in the file several times is fetched once."""
    payload: dict[int, float] = defaultdict(float)
    forms: dict[int, Counter[str]] = defaultdict(Counter)
    owners, paid = Owners(new.layout), set[str]()
    for slab, one in zip(new.slabs, new.cuts, strict=True):
        if slab.id in costs and slab.id not in paid:
            paid.add(slab.id)
            for number, length in owners.of(one):
                payload[number] += costs[slab.id].bytes * length / slab.length
                forms[number][costs[slab.id].form] += length
    return payload, forms


def _tensor_limit(base: FileRelease, new: FileRelease, old: Tensor | None, tensor: Tensor) -> Limit:
    if old is None:
        return limit_of_new(new.chunks(tensor), tensor.width)

    def chunks() -> Iterator[tuple[bytes, bytes]]:
        return zip(base.chunks(old), new.chunks(tensor), strict=True)

    words = tensor.length // tensor.width
    return limit_of_step(chunks, words=words, width=tensor.width, mantissa=tensor.mantissa, row=tensor.row)


def _skeleton_limit(base: FileRelease, new: FileRelease) -> Limit:
    """Slab by slab, against the one at its place."""
    before = {slab.key: slab for slab in base.slabs}
    changed = bits = length = 0.0
    for slab, one in zip(new.slabs, new.cuts, strict=True):
        if not _is_skeleton(one):
            continue
        old = before.get(slab.key)
        if old is None or old.length != slab.length:
            limit = limit_of_new(iter((new.read(slab),)), 1)
        else:
            pair = [(base.read(old), new.read(slab))]
            limit = limit_of_step(pair.__iter__, words=slab.length, width=1, mantissa=0, row=one.row)
        changed += slab.length * (1.0 if limit.changed is None else limit.changed)
        bits, length = bits + limit.bits, length + slab.length
    return Limit(changed=changed / length, bits=bits)


def _is_skeleton(one: Cut) -> bool:
    return one.key.startswith("s/")
