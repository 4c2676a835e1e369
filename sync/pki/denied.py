"""Which certificates are revoked, read from the CA's revocation list whenever that file changes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from common.errors import ConfigError, IdentityRefused
from sync.pki.certificates import Facts, read_certificate, read_revocations

logger = logging.getLogger(__name__)
_LOOK_S: Final = 0.5  # how old the knowledge may be


class DenyList:
    """Asked at every call. A list that cannot be read (any more) changes nothing: what was revoked stays revoked."""

    def __init__(self, path: Path, roots: bytes, *, now: Callable[[], datetime] | None = None) -> None:
        """Raises `ConfigError` where there is no list of our CA."""
        self._path, self._roots, self._now = path, roots, now or (lambda: datetime.now(UTC))
        self._lock, self._looked = threading.Lock(), 0.0
        self._state: tuple[int, ...] = ()
        self._serials: frozenset[str] = frozenset()
        try:
            self._look()
        except (OSError, IdentityRefused) as exc:
            raise ConfigError("sync ca", str(path), str(exc), "the revocation list of this CA (crl.pem)") from exc

    def admit(self, certificate: bytes) -> Facts:
        """Whose certificate that is; TLS has checked its signature. Raises `IdentityRefused`."""
        facts = read_certificate(certificate)
        self.check(facts)
        return facts

    def check(self, facts: Facts) -> None:
        """Again, for a connection that has lasted. Raises `IdentityRefused`."""
        if facts.serial in self._current():
            raise IdentityRefused(facts.name, "its certificate was revoked; accepted: a new enrolment")
        if not facts.begins <= self._now() < facts.ends:
            raise IdentityRefused(facts.name, f"its certificate has expired ({facts.ends:%Y-%m-%d %H:%M} UTC)")

    def _current(self) -> frozenset[str]:
        with self._lock:
            if time.monotonic() - self._looked >= _LOOK_S:
                try:
                    self._look()
                except (OSError, IdentityRefused) as exc:
                    logger.error("the revocation list %s cannot be read, the last one counts: %s", self._path, exc)
            return self._serials

    def _look(self) -> None:
        self._looked = time.monotonic()
        stat = os.stat(self._path)
        state = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if state != self._state:
            self._serials = read_revocations(self._path.read_bytes(), self._roots)
            self._state = state
