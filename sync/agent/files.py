"""Files that stay open from one slab to the next: opening each anew would cost more than a small slab itself."""

from __future__ import annotations

import os
from typing import Final

_MOST: Final = 64


class OpenFiles:
    """By path; the one opened first goes where there are too many. Not for several threads."""

    def __init__(self, flags: int) -> None:
        self._flags, self._fds = flags, dict[str, int]()

    def fd(self, path: str) -> int:
        """Raises `OSError`."""
        fd = self._fds.get(path)
        if fd is None:
            if len(self._fds) >= _MOST:
                os.close(self._fds.pop(next(iter(self._fds))))
            fd = self._fds[path] = os.open(path, self._flags | os.O_CLOEXEC)
        return fd

    def close(self) -> None:
        """What is asked for later is opened again."""
        while self._fds:
            os.close(self._fds.popitem()[1])
