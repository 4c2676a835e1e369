"""What syncing costs where a release has many small slabs: as many syncs as it has files and folders, and no more."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.power.log import Op
from tests.power.record import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """Of one release. `journal`: syncs of the journal, some of `syncs`."""

    slabs: int
    syncs: int
    journal: int
    sync_s: float  # spent in them
    seconds: float


def installs(one: Recorder, *sizes: int) -> list[Install]:
    """Releases of `sizes` small slabs, one after another."""
    found = []
    one.publish_small(2)
    with one.life("poll", "pass"):
        for size in sizes:
            slabs, before = one.publish_small(size), len(one.recording().entries)
            started = time.monotonic()
            one.say("poll", "pass")
            seconds = time.monotonic() - started
            syncs = [entry for entry in one.recording().entries[before:] if entry.op is Op.SYNC]
            journal = [entry for entry in syncs if "journal.db" in entry.path]
            sync_s = sum(entry.offset for entry in syncs) / 1e9
            install = Install(slabs=slabs, syncs=len(syncs), journal=len(journal), sync_s=sync_s, seconds=seconds)
            found.append(install)
    return found
