"""What a push of one file after another costs, with the release path's own slabs and codec: `slabs.py OLD NEW`.

OLD and NEW are two versions of a model file (safetensors, ONNX, anything). Prints bytes and % of raw for NEW in full,
and for a node that has OLD: an unchanged slab costs nothing, any other its delta or itself, whichever is smaller.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

from sync import codec
from sync.containers import read_layout
from sync.slabs import Cut, cut, read_pieces, slab_id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    bases = {place.key: raw for place, raw in slabs(arguments.old)}
    known = {slab_id(raw) for raw in bases.values()}
    raw_bytes = full_bytes = delta_bytes = changed = count = 0
    started = time.monotonic()
    for place, raw in slabs(arguments.new):
        full = len(codec.encode_full(raw, place.width))
        count, raw_bytes, full_bytes = count + 1, raw_bytes + len(raw), full_bytes + full
        if slab_id(raw) not in known:
            changed += 1
            delta_bytes += min(full, delta(raw, bases.get(place.key), place) or full)
    seconds = time.monotonic() - started
    print(f"{count} slabs, {raw_bytes} bytes raw; {changed} slabs changed; encoded in {seconds:.1f} s")
    for name, size in (("full", full_bytes), ("delta", delta_bytes)):
        print(f"{name:6} {size:12} bytes  {size / raw_bytes:7.2%} of raw")


def slabs(path: Path) -> Iterator[tuple[Cut, bytes]]:
    fd = os.open(path, os.O_RDONLY)
    try:
        for place in cut(read_layout(path)):
            yield place, read_pieces(fd, place.pieces)
    finally:
        os.close(fd)


def delta(raw: bytes, base: bytes | None, place: Cut) -> int | None:
    if base is None or len(base) != len(raw):
        return None
    return len(codec.encode_delta(raw, base, place.width, is_float=place.is_float))


if __name__ == "__main__":
    main()
