"""Our own side of the comparison: what a node fetches for a pair of files, and the file rebuilt from that.

`differ` is `outrider sync diff --apply`, by the same calls: the bytes come from its report, and the rebuilt file is
compared with the new one byte by byte. What `full` alone costs is counted here, slab by slab.
"""

from __future__ import annotations

import filecmp
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.codec.pairs import Files
from sync import codec
from sync.codec.choice import Pair
from sync.diff.diff import diff, manifest_name
from sync.diff.file_release import FileRelease, opened
from sync.diff.rebuild import rebuild
from sync.store import Store

_SLACK = 0.01  # of a payload over `full`, of the wire over the best peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """Bytes. `payload` has the table sets in it; `full`: what its slabs cost as objects that stand alone."""

    raw: int
    payload: int
    index: int
    manifest: int
    bound: int
    full: int
    forms: dict[str, int]
    encode_s: float
    rebuild_s: float
    rebuild_cpu_s: float

    @property
    def wire(self) -> int:
        return self.payload + self.index + self.manifest

    @property
    def is_within_full(self) -> bool:
        return self.payload <= self.full * (1 + _SLACK)

    def is_near(self, best: int) -> bool:
        """Behind the best peer by at most index, manifest and 1 %."""
        return self.wire <= best * (1 + _SLACK) + self.index + self.manifest


def differ(files: Files, folder: Path) -> Ours:
    """`folder` is new: the store and the rebuilt file are left in it."""
    folder.mkdir()
    store, out = Store(folder / "store"), folder / "rebuilt"
    with opened(files.old, version=1) as base, opened(files.new, version=2) as new:
        started = time.perf_counter()
        report = diff(base, new, store=store)
        encoded, used = time.perf_counter(), time.process_time()
        rebuild(base, store.read(manifest_name(base, new)) or b"", store, out)
        rebuilt, used = time.perf_counter(), time.process_time() - used
        full = _full_bytes(base, new)
    if not filecmp.cmp(out, files.new, shallow=False):
        raise ValueError(f"{files.name} was not rebuilt")
    return Ours(
        raw=report.raw_bytes,
        payload=report.payload_bytes + report.table_bytes,
        index=report.index_bytes,
        manifest=report.manifest_bytes,
        bound=report.bound_bytes,
        full=full,
        forms={form: size for form, size in report.forms.items() if size},
        encode_s=encoded - started,
        rebuild_s=rebuilt - encoded,
        rebuild_cpu_s=used,
    )


def slab_pairs(files: Files) -> list[Pair]:
    """All slabs that differ, beside those at their places in the old file."""
    found = []
    with opened(files.old, version=1) as base, opened(files.new, version=2) as new:
        places = {slab.key: slab for slab in base.slabs}
        for slab, one in zip(new.slabs, new.cuts, strict=True):
            old = places.get(slab.key)
            if old is not None and old.id != slab.id and old.length == slab.length:
                raw, before = new.read(slab), base.read(old)
                kind = {"width": slab.width, "mantissa": slab.mantissa, "row": one.row}
                found.append(Pair(raw=raw, base=before, base_id=old.id, **kind))
    return found


def _full_bytes(base: FileRelease, new: FileRelease) -> int:
    known, total = set(base.manifest.slabs()), 0
    for slab in new.slabs:
        if slab.id not in known:
            known.add(slab.id)
            total += len(codec.encode_full(new.read(slab), slab.width, slab.mantissa).to_object())
    return total
