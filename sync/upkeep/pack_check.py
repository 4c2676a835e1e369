"""A pack against its index: every table set and every payload, decoded where the base is here. Read in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

from common.errors import CorruptSlab
from sync import codec
from sync.packs import Entry, Index, IndexFile

Raw = Callable[[str], bytes | None]  # the proven bytes of a slab, where they are to be had


def pack_problem(index: Index | IndexFile, file: BinaryIO, raw: Raw) -> str | None:
    """None where all of it is sound. An `IndexFile` does not know the slabs: then hashes have to do."""
    sets: list[codec.TableSet] = []
    for number, one in enumerate(index.tables):
        data = file.read(one.length)
        try:
            if codec.payload_hash(data) != one.digest:
                return f"table set {number}: its hash does not match"
            sets.append(codec.parse_tables(data))
        except CorruptSlab as exc:
            return f"table set {number}: {exc.problem}"
    for problem in _problems(index, file, sets, raw):
        if problem is not None:
            return problem
    return "something follows its last payload" if file.read(1) else None


def _problems(
    index: Index | IndexFile, file: BinaryIO, sets: Sequence[codec.TableSet], raw: Raw
) -> Iterator[str | None]:
    if isinstance(index, IndexFile):
        for one in index.entries:
            payload = file.read(int(one["payload_length"]))
            is_sound = codec.payload_hash(payload) == one["payload_hash"].tobytes()
            yield None if is_sound else "the hash of a payload does not match"
        return
    for entry in index.entries:
        yield _problem(entry, file.read(entry.header.payload_length), sets, raw)


def _problem(entry: Entry, payload: bytes, sets: Sequence[codec.TableSet], raw: Raw) -> str | None:
    header = entry.header
    if len(payload) != header.payload_length or codec.payload_hash(payload) != header.payload_hash:
        return f"slab {header.slab}: payload hash does not match"
    base = raw(header.base or "")
    if base is None or header.form not in codec.FORM_NAMES:
        return None  # nothing to prove it with: the payload is what was written, that is all
    try:
        codec.decode(header, payload, base=base, tables=sets[header.tables] if header.form == codec.CTX else None)
    except CorruptSlab as exc:
        return str(exc)
    return None
