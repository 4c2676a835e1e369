"""What a push of one file after another costs, with the release path's own slabs and codec: `slabs.py OLD NEW`.

OLD and NEW are two versions of a model file (safetensors, ONNX, anything). Prints bytes and % of raw for NEW in full,
and for a node that has OLD: an unchanged slab costs nothing, any other its difference or itself, whichever is smaller,
with table sets and index. `outrider sync diff` says more about one pair; this prints the seconds.
"""

from __future__ import annotations

import argparse
import io
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sync import codec
from sync.codec.choice import Pair
from sync.containers import read_layout
from sync.deltas import Change, write_pack
from sync.packs import parse_index
from sync.slabs import Cut, cut, read_pieces, slab_id

OLD, NEW = "00" * 32, "11" * 32  # stand for the releases' digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    bases = {place.key: raw for place, raw in slabs(arguments.old)}
    known = {slab_id(raw) for raw in bases.values()}
    started = time.monotonic()
    full = {
        slab_id(raw): len(codec.encode_full(raw, place.width, place.mantissa).to_object())
        for place, raw in slabs(arguments.new)
    }
    whole = time.monotonic()

    def changes() -> Iterator[Change]:
        for place, raw in slabs(arguments.new):
            base, slab = bases.get(place.key), slab_id(raw)
            if slab not in known and base is not None and len(base) == len(raw):
                kind = {"width": place.width, "mantissa": place.mantissa, "row": place.row}
                yield Change(pair=Pair(raw=raw, base=base, base_id=slab_id(base), **kind), full_bytes=full[slab])

    index = write_pack(io.BytesIO(), changes, base=OLD, target=NEW)
    done = time.monotonic()
    forms = cost(full, known, index)
    raw_bytes = arguments.new.stat().st_size
    print(f"{len(full)} slabs, {raw_bytes} bytes raw; {len(full.keys() - known)} slabs changed")
    print(f"full encoded in {whole - started:.1f} s, differences in {done - whole:.1f} s")
    for name, size in (("full", sum(full.values())), ("delta", sum(forms.values())), *sorted(forms.items())):
        print(f"{name:8} {size:12} bytes  {size / raw_bytes:8.3%} of raw")


def cost(full: dict[str, int], known: set[str], data: bytes | None) -> Counter[str]:
    """By form: what a node with the old file fetches."""
    index = None if data is None else parse_index(data, base=OLD, target=NEW)
    smallest: dict[str, tuple[int, str]] = {slab: (size, "- full") for slab, size in full.items() if slab not in known}
    for entry in () if index is None else index.entries:
        found = (entry.header.payload_length, f"- {entry.header.form_name}")
        smallest[entry.header.slab] = min(smallest[entry.header.slab], found)
    forms: Counter[str] = Counter()
    for size, name in smallest.values():
        forms[name] += size
    if index is not None and data is not None:
        forms["- tables"] = sum(one.length for one in index.tables)
        forms["- index"] = len(data)
    return forms


def slabs(path: Path) -> Iterator[tuple[Cut, bytes]]:
    fd = os.open(path, os.O_RDONLY)
    try:
        for place in cut(read_layout(path)):
            yield place, read_pieces(fd, place.pieces)
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
