"""A node's identity: a key that was made here and never leaves, and the CA's certificate for it, in one file (0600).

`identity.pem` is replaced as a whole, and read again whenever it changed: a renewal, or an enrolment from the command
line, reaches a running agent without a restart. Until a new one is on the disk the old one is used.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from common.clock import Clock, SystemClock
from common.errors import ConfigError, IdentityRefused, OutriderError
from sync.pki.certificates import Facts, check_name, is_issued_by, is_pair, new_key, new_request, read_certificate
from sync.pki.files import private_folder, read_private, write_private

logger = logging.getLogger(__name__)
FILE: Final = "identity.pem"
ROOT_FILE: Final = "ca.pem"
_PENDING: Final = "pending.pem"  # the key of an enrolment under way
_LOOK_S: Final = 30.0  # the wall clock may step: nothing sleeps for longer
_FIRST_RETRY_S: Final = 10.0
_LAST_RETRY_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What is shown (key and certificate, PEM) and what is believed (roots, PEM)."""

    pem: bytes
    roots: bytes
    facts: Facts


class Identity:
    """The identity in a folder, for as many threads as like."""

    def __init__(self, folder: Path, root_file: Path | None = None) -> None:
        """Nothing is read yet: a device may be enrolled after its agent has started."""
        self.folder, self.root_file = folder, root_file or folder / ROOT_FILE
        self._path, self._lock = folder / FILE, threading.Lock()
        self._state: tuple[int, ...] = ()
        self._problem = ""
        self._credentials: Credentials | None = None

    def current(self) -> Credentials:
        """The newest that is whole; a new object exactly when it changed.

        Raises `ConfigError` or `IdentityRefused` where there has been none so far, or none that others cannot read.
        """
        with self._lock:
            try:
                if self._credentials is None or self._look() != self._state:
                    self._credentials = self._read()
                self._problem = ""
            except (OSError, ConfigError, IdentityRefused) as exc:
                if self._credentials is None:
                    raise
                if self._problem != str(exc):
                    logger.error("the identity cannot be read again, the one in memory is used: %s", exc)
                self._problem = str(exc)
            return self._credentials

    def tls(self) -> ssl.SSLContext:
        """For a connection that is made now: shows this identity, wants a server of our CA under the name dialled."""
        self.current()
        context = ssl.create_default_context(cafile=str(self.root_file))
        context.load_cert_chain(self._path)
        return context

    def store(self, key: bytes, certificate: bytes) -> Facts:
        """Takes the place of what is there. Raises `IdentityRefused` for a certificate of another key or CA."""
        old = self.current()
        facts = _check(key, certificate, old.roots, old.facts.name)
        write_private(self._path, key + certificate)
        return facts

    def _look(self) -> tuple[int, ...]:
        found = [os.stat(path) for path in (self._path, self.root_file)]
        return tuple(number for one in found for number in (one.st_ino, one.st_mtime_ns, one.st_size))

    def _read(self) -> Credentials:
        try:
            state, roots = self._look(), self.root_file.read_bytes()
        except OSError as exc:
            problem = f"{exc.filename} cannot be read: {exc.strerror}"
            accepted = "a folder that `outrider sync enrol` filled"
            raise ConfigError("sync", "identity", problem, accepted) from exc
        pem = read_private(self._path, "sync")
        credentials = Credentials(pem=pem, roots=roots, facts=read_certificate(pem))
        self._state = state
        return credentials


class Pending:
    """A device's key before it has a certificate. It stays the same until it has: an enrolment may be cut off."""

    def __init__(self, folder: Path, node: str, roots: bytes) -> None:
        self._folder, self._node, self._roots = folder, check_name(node), roots
        private_folder(folder)
        path = folder / _PENDING
        if not path.exists():
            write_private(path, new_key())
        self._key = read_private(path, "sync enrol")

    def request(self) -> bytes:
        return new_request(self._key, self._node)

    def finish(self, certificate: bytes) -> Facts:
        """Writes the identity. Raises `IdentityRefused` for a certificate of another key, name or CA."""
        facts = _check(self._key, certificate, self._roots, self._node)
        write_private(self._folder / ROOT_FILE, self._roots)
        write_private(self._folder / FILE, self._key + certificate)
        (self._folder / _PENDING).unlink()
        return facts


async def keep_renewed(identity: Identity, renew: Callable[[Identity], Facts], *, clock: Clock | None = None) -> None:
    """Until cancelled: asks for a new certificate at two thirds of the life of each, and again while that fails."""
    clock, failures, not_before = clock or SystemClock(), 0, 0.0
    while True:
        pause_s = _LOOK_S
        try:
            facts = identity.current().facts
        except (OutriderError, OSError):  # not enrolled yet: the polls say so
            await asyncio.sleep(pause_s)
            continue
        pause_s = min(_LOOK_S, max(0.05, (facts.ends - facts.begins).total_seconds() / 1000))
        if is_due(facts, clock.now()) and clock.monotonic() >= not_before:
            try:
                new = await asyncio.to_thread(renew, identity)
                failures = 0
                logger.info("the certificate of %r was renewed, until %s", new.name, new.ends.isoformat())
            except (OutriderError, OSError) as exc:
                failures += 1
                left_s = (facts.ends - clock.now()).total_seconds()
                delay_s = retry_s(failures, left_s) * random.uniform(0.5, 1.0)
                not_before = clock.monotonic() + delay_s
                logger.warning("the certificate of %r cannot be renewed: %s; again in %.0f s", facts.name, exc, delay_s)
        await asyncio.sleep(pause_s)


def is_due(facts: Facts, now: datetime) -> bool:
    return now >= facts.renew_at()


def retry_s(failures: int, left_s: float) -> float:
    """After so many failures in a row: twice as long each time, an hour at most, at least ten tries in what is left."""
    longest = min(_LAST_RETRY_S, max(left_s / 10, _FIRST_RETRY_S))
    return float(min(longest, _FIRST_RETRY_S * 2 ** min(failures - 1, 20)))


def _check(key: bytes, certificate: bytes, roots: bytes, name: str) -> Facts:
    facts = read_certificate(certificate)
    if not is_pair(key, certificate) or facts.name != name or not is_issued_by(certificate, roots):
        raise IdentityRefused(facts.name, f"the answer is not our CA's certificate for {name!r} and its key")
    return facts
