"""Which checkpoints of a trainer are finished, the newest first. Rules only: what was seen in two looks goes in.

A file counts when its size and its time of change were the same in both looks. Beside that the trainer's own signs:
    *.done           once there is one, only what has one counts: `<file>.done`, `<stem>.done` or `<folder>.done`
    latest           (a text file or a link at the top) names the only one that counts: a file, or a folder with one
    *.index.json     a checkpoint in several files: it counts when all that the index names are there and stand still
Whether a file is whole in itself is for whoever reads it to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Final

INDEX: Final = ".index.json"
LATEST: Final = "latest"
MAX_TEXT_BYTES: Final = 16 << 20  # of an index
_DONE: Final = ".done"
_SHARD: Final = re.compile(r"-\d+-of-\d+\.[a-z]+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A file in one look. `changed`: seconds since 1970."""

    size: int
    changed: float


Look = Mapping[str, Seen]  # by name, with slashes, relative to what is watched


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """`files`: one, or the shards that `name`, an index, lists. `problem`: why it cannot be one after all."""

    name: str
    files: tuple[str, ...]
    changed: float  # of what was written last
    problem: str = ""

    @property
    def age(self) -> tuple[float, str]:
        """Greater: newer."""
        return self.changed, self.name


def finished(before: Look, now: Look, text: Callable[[str], str], pattern: str) -> list[Checkpoint]:
    """Checkpoints in files with names like `pattern` (*.safetensors), the newest first. `text` reads a small file.

    Raises what `text` raises.
    """
    still = {name for name, seen in now.items() if before.get(name) == seen}
    found = (one for one in _candidates(now, text, pattern) if still.issuperset((one.name, *one.files)))
    chosen = text(LATEST).strip().rstrip("/") if LATEST in now else None
    is_marked = any(name.endswith(_DONE) for name in now)
    counted = (
        one
        for one in found
        if (not is_marked or _has_marker(one, now)) and (chosen is None or _is_or_holds(chosen, one.name))
    )
    return sorted(counted, key=lambda one: one.age, reverse=True)


def _candidates(now: Look, text: Callable[[str], str], pattern: str) -> Iterator[Checkpoint]:
    for name, seen in now.items():
        path = PurePosixPath(name)
        if any(part.startswith(".") for part in path.parts):
            continue
        if fnmatchcase(path.name, pattern + INDEX):
            shards = tuple(str(path.parent / shard) for shard in _listed(text(name)))
            if not shards:
                problem = "is no index that names files beside it (weight_map)"
                yield Checkpoint(name=name, files=(), changed=seen.changed, problem=problem)
            elif all(shard in now for shard in shards):
                changed = max(seen.changed, *(now[shard].changed for shard in shards))
                yield Checkpoint(name=name, files=shards, changed=changed)
        elif fnmatchcase(path.name, pattern) and not _SHARD.search(name):
            yield Checkpoint(name=name, files=(name,), changed=seen.changed)


def _listed(text: str) -> tuple[str, ...]:
    """The files that an index names (``weight_map``, by tensor), each once; none where it is no index."""
    try:
        found = tuple(dict.fromkeys(json.loads(text)["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ()
    return found if all(isinstance(one, str) and PurePosixPath(one).name == one for one in found) else ()


def _has_marker(one: Checkpoint, now: Look) -> bool:
    return any(f"{mark}{_DONE}" in now for mark in _marks(PurePosixPath(one.name)))


def _marks(path: PurePosixPath) -> Iterable[str]:
    """The file, its stem, and every folder that it is in."""
    yield str(path)
    yield str(path.with_suffix(""))
    yield from (str(parent) for parent in path.parents if parent.name)


def _is_or_holds(chosen: str, name: str) -> bool:
    return name == chosen or name.startswith(f"{chosen}/")
