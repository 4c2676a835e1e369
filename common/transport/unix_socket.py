"""The files of Unix sockets: never taken from a process that lives, taken from one that died, removed by their owner.

A server binds below a name of its own and gets the file linked to where callers look for it, which fails where one is
already. So a library that removes what it bound, whoever has the path by then, removes nothing.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.transport.listen import cannot_listen

_ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class SocketFile:
    """A socket's file; once another one is at its path, that is not touched."""

    path: Path
    device: int
    inode: int

    def remove(self) -> None:
        """To be called while the socket is open: after that its inode may be another's."""
        try:
            found = self.path.lstat()
        except OSError:
            return
        if (found.st_dev, found.st_ino) == (self.device, self.inode):
            self.path.unlink(missing_ok=True)


def claim(server: str, path: Path, listen: Callable[[Path], object]) -> SocketFile:
    """The socket that `listen` makes, at `path`. Raises `ConfigError` where another process listens there."""
    _make_way(server, path)
    own = path.with_name(f".{secrets.token_hex(3)}")
    try:
        listen(own)
        found = own.lstat()
        os.link(own, path, follow_symlinks=False)
    except OSError as exc:
        raise cannot_listen(server, str(path), exc) from exc
    finally:
        own.unlink(missing_ok=True)
    return SocketFile(path, found.st_dev, found.st_ino)


def _make_way(server: str, path: Path) -> None:
    """Removes what a process that died left at `path`."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return  # no socket: that is not removed, and linking fails
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(_ANSWER_S)
            caller.connect(str(path))
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
        return
    except TimeoutError:
        pass  # too busy to answer, but there
    except FileNotFoundError:
        return
    except OSError as exc:
        if exc.errno != errno.EAGAIN:
            raise cannot_listen(server, str(path), exc) from exc
    raise cannot_listen(server, str(path), OSError("another process listens there"))
