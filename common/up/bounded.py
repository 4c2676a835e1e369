"""Logs of children, kept within a size: what is too long moves to ``NAME.log.1`` and the log begins anew.

A child appends through a descriptor of its own, so its file cannot be renamed away from it: it is copied and cut off.
Lines written in between (microseconds) are lost; a full disk costs the copy, never the bound.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

MAX_LOG_BYTES = 8 << 20


def bound(log: Path, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """True when the log was too long and begins anew. Raises `OSError` where it cannot be cut off."""
    try:
        if log.stat().st_size <= max_bytes:
            return False
    except FileNotFoundError:
        return False
    kept = log.with_name(f"{log.name}.1")
    try:
        shutil.copyfile(log, kept)
    except OSError:
        with contextlib.suppress(OSError):
            kept.unlink()
    os.truncate(log, 0)
    return True
