"""Folders that are there after a power loss: a new one is a name in its parent, which has to be synced too."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sync.disk import sync_folder


def make_folder(folder: Path) -> None:
    """And every folder on the way to it, durably, whoever made them: maybe a process that ended just then."""
    folder.mkdir(parents=True, exist_ok=True)
    for parent in folder.absolute().parents:
        with contextlib.suppress(OSError):  # not to be opened: then it is not one that was made for this either
            sync_folder(parent)
