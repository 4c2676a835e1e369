"""What differs between two releases, encoded into a pack: slabs at the same place, several at once, none kept.

Two passes over the slabs: one to make the table sets that serve all of them, one to encode each in the form it takes.
Whoever has the bytes of both releases hands them in, one slab after the other.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sync.codec import Encoded
from sync.codec.choice import Pair, choose, train
from sync.packs import PackWriter
from sync.release import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A slab that the base does not have, and the base's slab at its place. `full_bytes`: what it costs alone."""

    pair: Pair
    full_bytes: int


def write_pack(
    file: BinaryIO,
    changes: Callable[[], Iterator[Change]],
    *,
    base: Manifest,
    target: Manifest,
    folder: Path | None = None,
) -> bytes | None:
    """Writes the pack to `file` and returns its index; None when every slab is better off alone.

    `changes` is called twice, and has to give the same slabs both times. `folder`: for temporary files.
    """
    tables = train(change.pair for change in changes())
    cores = len(os.sched_getaffinity(0))
    with (
        PackWriter(file, base=base, target=target, tables=tables, folder=folder) as pack,
        ThreadPoolExecutor(cores, thread_name_prefix="encode") as pool,
    ):

        def encode(change: Change) -> list[Encoded]:
            return choose(change.pair, tables, full_bytes=change.full_bytes)

        for forms in _in_order(pool, encode, changes(), ahead=cores):
            pack.add(forms)
        return pack.finish()


def _in_order(
    pool: ThreadPoolExecutor, work: Callable[[Change], list[Encoded]], items: Iterable[Change], *, ahead: int
) -> Iterator[list[Encoded]]:
    """`work` of each item, in order; at most `ahead` items are under way."""
    waiting: deque[Future[list[Encoded]]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
