"""The installer of a node whose engine is somebody else's process: Triton, vLLM, a script that waits for files.

A release is "installed" when `current/<model>` leads to its folder: a symbolic link that is replaced at once. Nothing
is opened here, so that the golden gate is not run: whoever serves the files has to judge them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from common.bundle import Bundle, Variant
from common.serving.vitals import Vitals
from sync.agent.ports import GateVerdict, Staged
from sync.disk import sync_folder


class LinkInstaller:
    """`folder`: where the links are. `variants`: those that are wanted; every one where it is empty."""

    def __init__(self, folder: Path, variants: tuple[str, ...] = ()) -> None:
        self._folder, self._variants = folder, variants

    def can_run(self, model: str, engine: str, variant: Variant) -> bool:
        return not self._variants or variant.name in self._variants

    def prepare(self, staged: Staged) -> Staged:
        """Raises `BundleError` for a folder that is no bundle."""
        Bundle.open(staged.folder)
        return staged

    def gate(self, prepared: Staged) -> GateVerdict:
        return GateVerdict(passed=True, detail="no engine here: not judged")

    def activate(self, prepared: Staged) -> None:
        link = self._folder / prepared.model
        if link.is_symlink() and Path(os.readlink(link)) == prepared.folder:
            with contextlib.suppress(OSError):  # on a failing disk, too, it leads where it should
                self._sync()  # whoever set it may have ended just then
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        new = self._folder / f".new-{secrets.token_hex(8)}"
        new.symlink_to(prepared.folder, target_is_directory=True)
        new.replace(link)
        self._sync()

    def discard(self, prepared: Staged) -> None:
        pass

    def vitals(self, model: str) -> tuple[Vitals, Vitals | None] | None:
        return None

    def recheck(self, model: str) -> GateVerdict | None:
        return None

    def settle(self, model: str) -> None:
        pass

    def revert(self, model: str) -> bool:
        return False  # what the link was before is in the journal: the agent installs that

    def withdraw(self, model: str, reason: str) -> None:
        link = self._folder / model
        if link.is_symlink():
            link.unlink()
            self._sync()

    def _sync(self) -> None:
        """The links, and that there is a folder of them."""
        sync_folder(self._folder)
        sync_folder(self._folder.parent)
