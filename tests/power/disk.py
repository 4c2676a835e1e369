"""What a disk may hold after a power loss: a model that promises no more than POSIX does.

A file's data is there once the file was synced; of what was written since, any subset, each write whole or torn at its
sectors, and the size it would have, with zeros. A name is there once its folder was synced, and syncing a file does not
do it; of what was created, renamed and removed since, any subset. A rename is done or not, never half; it is certain
once the folder of its new name was synced.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.power.log import Entry, Op

SECTOR: Final = 512
_SHARES: Final = (0.0, 0.1, 0.5, 0.9, 1.0)  # of what was not synced that survives
_TORN: Final = 0.3  # of the writes that survive


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Of a symbolic link."""

    path: str


Image = dict[str, "bytes | Target | None"]  # by path, folders before what is in them; None: a folder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """Of a file's content: `data` written at `offset`; without data a new size, `is_cut` where it may be smaller."""

    number: int
    offset: int
    data: bytes | None = None
    is_cut: bool = False

    @property
    def end(self) -> int:
        return self.offset + len(self.data or b"")

    def apply(self, content: bytearray) -> None:
        content.extend(bytes(max(0, self.end - len(content))))
        if self.data is not None:
            content[self.offset : self.end] = self.data
        elif self.is_cut:
            del content[self.offset :]

    def tear(self, content: bytearray, rng: random.Random) -> None:
        """Some of its sectors, and the size or not."""
        if self.data is None:
            return self.apply(content)
        size = len(content)
        content.extend(bytes(max(0, self.end - size)))
        at, last = self.offset, size
        while at < self.end:
            end = min(self.end, at - at % SECTOR + SECTOR)
            if rng.random() < 0.5:
                content[at:end] = self.data[at - self.offset : end - self.offset]
                last = max(last, end)
            at = end
        if rng.random() < 0.5:
            del content[last:]
        return None


@dataclass(eq=False, slots=True)
class _File:
    live: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[_Change] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Link:
    target: str


@dataclass(eq=False, slots=True)
class _Folder:
    live: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)


_Node = _File | _Link | _Folder
_Slot = tuple[_Folder, str]


@dataclass(eq=False, slots=True, kw_only=True)
class _Naming:
    """`slot` leads to `node` from now on, or to nothing; `source` is where a rename took it from."""

    number: int
    slot: _Slot
    node: _Node | None
    source: _Slot | None = None

    def apply(self, entries: Callable[[_Folder], dict[str, _Node]]) -> None:
        if self.source is not None:
            entries(self.source[0]).pop(self.source[1], None)
        if self.node is None:
            entries(self.slot[0]).pop(self.slot[1], None)
        else:
            entries(self.slot[0])[self.slot[1]] = self.node


class Disk:
    """The folder that was watched, empty at first."""

    def __init__(self) -> None:
        self._root = _Folder()
        self._inodes: dict[int, _Node] = {}
        self._names: list[_Naming] = []
        self._number = 0

    def apply(self, entry: Entry) -> None:
        self._number += 1
        op = entry.op
        if op in (Op.CREATE, Op.MKDIR):
            self._inodes[entry.inode] = node = _File() if op is Op.CREATE else _Folder()
            self._name(entry.path, node)
        elif op is Op.SYMLINK:
            self._name(entry.path, _Link(entry.data.decode()))
        elif op is Op.REMOVE:
            self._name(entry.path, None)
        elif op is Op.RENAME:
            folder, name = source = self._slot(entry.path)
            self._name(entry.path2, folder.live[name], source=source)
        elif op is Op.LINK:
            folder, name = self._slot(entry.path)
            self._name(entry.path2, folder.live[name])
        elif op in (Op.WRITE, Op.SIZE, Op.GROW):
            self._change(entry)
        elif op is Op.SYNC:
            self._sync(self._inodes.get(entry.inode, self._root))

    def whole(self) -> Image:
        """What the process saw."""
        return dict(self._walk(lambda folder: folder.live, lambda file: bytes(file.live)))

    def after_power_loss(self, rng: random.Random) -> Image:
        """One of the many."""
        survives = self._survivors(rng)
        copies: dict[int, dict[str, _Node]] = {}

        def entries(folder: _Folder) -> dict[str, _Node]:
            return copies.setdefault(id(folder), dict(folder.durable))

        def content(file: _File) -> bytes:
            found = bytearray(file.durable)
            for change in file.pending:
                if survives(change.number):
                    change.tear(found, rng) if rng.random() < _TORN else change.apply(found)
                elif change.end > len(found) and rng.random() < 0.25:
                    found.extend(bytes(change.end - len(found)))
            return bytes(found)

        for naming in self._names:
            if survives(naming.number):
                naming.apply(entries)
        return dict(self._walk(entries, content))

    def _survivors(self, rng: random.Random) -> Callable[[int], bool]:
        """Everything up to some moment, one thing alone, all but one, or a share of all."""
        kind = rng.random()
        if kind < 0.2:
            last = rng.randint(0, self._number)
            return lambda number: number <= last
        if kind < 0.5:
            one, is_alone = rng.choice(self._unsynced() or [0]), kind < 0.35
            return lambda number: (number == one) == is_alone
        names, data = rng.choice(_SHARES), rng.choice(_SHARES)
        of_names = {naming.number for naming in self._names}
        return lambda number: rng.random() < (names if number in of_names else data)

    def _unsynced(self) -> list[int]:
        files = [file for file in self._inodes.values() if isinstance(file, _File)]
        return [one.number for one in self._names] + [one.number for file in files for one in file.pending]

    # --- what happens ---

    def _slot(self, path: str) -> _Slot:
        folder, _, name = path.rpartition("/")
        at: _Node = self._root
        for part in folder.split("/") if folder else ():
            assert isinstance(at, _Folder)
            at = at.live[part]
        assert isinstance(at, _Folder)
        return at, name

    def _name(self, path: str, node: _Node | None, source: _Slot | None = None) -> None:
        naming = _Naming(number=self._number, slot=self._slot(path), node=node, source=source)
        naming.apply(lambda folder: folder.live)
        self._names.append(naming)

    def _change(self, entry: Entry) -> None:
        file = self._inodes[entry.inode]
        assert isinstance(file, _File)
        data = entry.data if entry.op is Op.WRITE else None
        change = _Change(number=self._number, offset=entry.offset, data=data, is_cut=entry.op is Op.SIZE)
        change.apply(file.live)
        file.pending.append(change)

    def _sync(self, node: _Node) -> None:
        if isinstance(node, _File):
            node.durable, node.pending = bytes(node.live), []
        elif isinstance(node, _Folder):
            for naming in [one for one in self._names if one.slot[0] is node]:
                naming.apply(lambda folder: folder.durable)
                self._supersede(naming)

    def _supersede(self, done: _Naming) -> None:
        """Whatever happened before to the names that `done` is about can come to light no more."""
        left = []
        for naming in self._names:
            if naming.number > done.number or naming.slot not in (done.slot, done.source):
                left.append(naming)
            elif naming.source is not None and naming is not done:  # it is not where it came from either
                left.append(_Naming(number=naming.number, slot=naming.source, node=None))
        self._names = left

    def _walk(
        self, entries: Callable[[_Folder], dict[str, _Node]], content: Callable[[_File], bytes]
    ) -> Iterator[tuple[str, bytes | Target | None]]:
        todo: list[tuple[str, _Folder]] = [("", self._root)]
        while todo:
            path, folder = todo.pop()
            for name, node in sorted(entries(folder).items()):
                where = f"{path}{name}"
                if isinstance(node, _Folder):
                    todo.append((f"{where}/", node))
                    yield where, None
                else:
                    yield where, content(node) if isinstance(node, _File) else Target(path=node.target)


def write_image(image: Image, folder: Path) -> None:
    """Makes `folder`, which must not be there."""
    folder.mkdir()
    for name, content in image.items():
        path = folder / name
        if content is None:
            path.mkdir()
        elif isinstance(content, Target):
            path.symlink_to(content.path)
        else:
            path.write_bytes(content)


def read_image(folder: Path) -> Image:
    """What is in a folder."""
    found: Image = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = Target(path=str(path.readlink()))
        else:
            found[name] = None if path.is_dir() else path.read_bytes()
    return found
