"""`verify`: checks a store, and heals what can be made anew from the rest.

The long look takes no lock: what it finds is looked at once more, since releases come and go meanwhile; healing holds
the lock. An object comes back through a pack whose base is sound, a pack from the objects at both its ends, a
manifest's other forms from the manifest. Signed files are never touched: those come from a backup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from common.clock import Clock, SystemClock
from common.errors import CorruptSlab
from sync import codec
from sync.manifests import pack
from sync.packs import Entry, Index
from sync.release_packs import ReleasePacks
from sync.store import object_name, pack_name
from sync.store.stores import AnyStore
from sync.upkeep.check import Finding, StoreCheck, kind_of, pack_ends, side_parts
from sync.upkeep.stock import Stock

_ORDER: Final = ("metadata", "target", "manifest", "side", "object", "index", "pack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`counts`: by kind and state, as found. `findings`: what is not as it should be, or was not."""

    counts: dict[str, dict[str, int]]
    findings: tuple[Finding, ...]

    @property
    def is_good(self) -> bool:
        return not any(one.is_wrong for one in self.findings)


def verify(store: AnyStore, *, repair: bool = False, wait_s: float = 60.0, clock: Clock | None = None) -> Report:
    """Raises `StoreBusy` where a repair does not get the lock within `wait_s`."""
    now = (clock or SystemClock()).now()
    counts: Counter[tuple[str, str]] = Counter()
    wrong: list[Finding] = []
    for one in StoreCheck(store, Stock(store), now).findings():
        counts[one.kind, one.state] += 1
        if one.is_wrong:
            wrong.append(one)
    if wrong and repair:
        with store.lock(wait_s):
            stock = Stock(store)
            wrong = list(_again(StoreCheck(store, stock, now), wrong, counts))
            wrong = list(_Repair(store, stock).heal(wrong))
            store.sync()
    elif wrong:
        wrong = list(_again(StoreCheck(store, Stock(store), now), wrong, counts))
    by_kind = {kind: {state: counts[kind, state] for of, state in sorted(counts) if of == kind} for kind in _ORDER}
    return Report(
        counts={kind: {state: count for state, count in found.items() if count} for kind, found in by_kind.items()},
        findings=tuple(one if one.outcome else replace(one, outcome=_advice(one)) for one in wrong),
    )


def _again(check: StoreCheck, wrong: Iterable[Finding], counts: Counter[tuple[str, str]]) -> Iterator[Finding]:
    """What is still wrong."""
    for old in wrong:
        one = check.look(old.kind, old.name)
        counts[old.kind, old.state] -= 1
        counts[one.kind, one.state] += 1
        if one.is_wrong:
            yield one


class _Repair:
    """Writes with the store's lock held."""

    def __init__(self, store: AnyStore, stock: Stock) -> None:
        self._store, self._stock, self._packs = store, stock, ReleasePacks(store)

    def heal(self, wrong: Sequence[Finding]) -> Iterator[Finding]:
        """Objects first: packs are made from them. What nothing needs is left to collection, and so is
        what nobody can say it of, while what is signed is broken."""
        yield from self._objects([one for one in wrong if one.kind == "object" and one.is_needed])
        done: set[tuple[str, str]] = set()
        for one in wrong:
            if one.kind == "side":
                yield self._side(one)
            elif one.kind in ("index", "pack") and one.is_needed:
                yield self._pack(one, done)
            elif one.kind != "object" or not one.is_needed:
                yield one

    def _objects(self, wrong: Sequence[Finding]) -> Iterator[Finding]:
        """One may be the base of another: until nothing more comes back."""
        left = {one.name: one for one in wrong}
        ways = self._ways({one.name for one in wrong})
        is_going_on = True
        while left and is_going_on:
            is_going_on = False
            for name in list(left):
                if self._recover(name, ways.get(name, ())):
                    is_going_on = True
                    yield replace(left.pop(name), is_healed=True, outcome="made anew from a difference")
        for name, one in left.items():
            if one.state == "damaged":
                self._store.remove(name)
            later = "a backup has it, or the next publish with these bytes writes it"
            yield replace(one, outcome=f"removed: {later}" if one.state == "damaged" else later)

    def _ways(self, names: set[str]) -> dict[str, list[tuple[Index, Entry]]]:
        """To each of these objects: entries of packs."""
        found: dict[str, list[tuple[Index, Entry]]] = {}
        for file in self._store.files("packs") if names else ():
            index = self._stock.index(*pack_ends(file.name)) if kind_of(file.name) == "index" else None
            if index is not None:
                for entry in index.entries:
                    if object_name(entry.header.slab) in names:
                        found.setdefault(object_name(entry.header.slab), []).append((index, entry))
        return found

    def _recover(self, name: str, ways: Iterable[tuple[Index, Entry]]) -> bool:
        for index, entry in ways:
            header = entry.header
            base = self._stock.raw(header.base or "")
            if base is None:
                continue
            try:
                payload, tables = self._part(index, entry.offset, header.payload_length), self._tables(index, entry)
                raw = codec.decode(header, payload, base=base, tables=tables)
            except CorruptSlab:
                continue
            self._store.replace(name, codec.encode_full(raw, header.width, header.mantissa).to_object())
            return True
        return False

    def _tables(self, index: Index, entry: Entry) -> codec.TableSet | None:
        if entry.header.form != codec.CTX:
            return None
        place = index.tables[entry.header.tables]
        data = self._part(index, place.offset, place.length)
        return codec.parse_tables(data) if codec.payload_hash(data) == place.digest else None

    def _part(self, index: Index, offset: int, length: int) -> bytes:
        found = self._store.part(pack_name(index.target, index.base), offset, length)
        return b"" if found is None else found[1]

    def _pack(self, one: Finding, done: set[tuple[str, str]]) -> Finding:
        """Index and pack are one thing; nodes take whole slabs where it cannot be made anew."""
        ends = pack_ends(one.name)
        target, base = self._stock.manifest_of(ends[0]), self._stock.manifest_of(ends[1])
        if ends not in done and target is not None and base is not None:
            done.add(ends)
            self._packs.rebuild(target, base)
        is_back = self._store.index(*ends) is not None
        return replace(one, is_healed=True, outcome="made anew" if is_back else "removed: nodes take whole slabs")

    def _side(self, one: Finding) -> Finding:
        name, start = side_parts(one.name)
        manifest, base = self._stock.manifest_data(name), self._stock.side_base(start)
        if manifest is None or base is None:
            return one
        self._store.replace(one.name, pack(manifest, base))
        return replace(one, is_healed=True, outcome="made anew")


def _advice(one: Finding) -> str:
    """For what no repair has touched."""
    if not one.is_needed:
        return "nothing needs it any more: gc removes it"
    if one.state == "expired":
        return "sign again: the sync service with its keys does, or a publish"
    if one.kind in ("metadata", "target"):
        return f"restore {one.name} from a backup of the store"
    if one.kind == "manifest":
        return f"restore {one.name} from a backup of the store; a release that is not desired may be deleted instead"
    return "run verify with --repair, once what is signed is sound"
