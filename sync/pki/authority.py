"""The CA of one fleet, in one folder (0700): its key, its root, what it issued, what it revoked.

It runs inside `outrider sync serve` and behind `outrider sync ca`; both may be at work at once. The root's certificate
(`ca.pem`) is what nodes are given; `crl.pem` is what brokers read.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

from common.clock import Clock, SystemClock
from common.errors import ConfigError, IdentityRefused
from sync.disk import folder_lock, write_atomic
from sync.pki.certificates import (
    OWN_PREFIX,
    SKEW,
    Issuer,
    Use,
    check_name,
    is_issued_by,
    new_key,
    new_root,
    public_key_of,
    read_certificate,
    read_request,
)
from sync.pki.denied import DenyList
from sync.pki.files import private_folder, read_private, write_private
from sync.pki.ledger import Entries, Grant, Ledger

logger = logging.getLogger(__name__)
ROOT_LIFE: Final = timedelta(days=3650)
SERVER_LIFE: Final = timedelta(days=30)
SERVICE: Final = f"{OWN_PREFIX}sync"  # who may publish hints
BROKER: Final = f"{OWN_PREFIX}broker"
_NODE_LIFE: Final = timedelta(days=7)


class Authority:
    def __init__(self, folder: Path, *, clock: Clock | None = None, node_life: timedelta = _NODE_LIFE) -> None:
        """An existing one. Raises `ConfigError` where there is none."""
        self.folder, self._clock, self._node_life = folder, clock or SystemClock(), node_life
        self.root_file, self.list_file = folder / "ca.pem", folder / "crl.pem"
        self._ledger = Ledger(folder / "ca.db")
        try:
            self.root = self.root_file.read_bytes()
        except OSError as exc:
            problem = f"{self.root_file} cannot be read: {exc.strerror}"
            raise ConfigError("sync ca", "--ca", problem, "a folder that `outrider sync ca init` made") from exc

    @classmethod
    def create(cls, folder: Path, *, clock: Clock | None = None, if_absent: bool = False) -> Authority:
        """A new key, root and empty revocation list. Never replaces a CA: `ConfigError`, or with `if_absent` that one.

        `crl.pem` is written last and makes it complete: a creation that was cut off is gone on with.
        """
        clock = clock or SystemClock()
        private_folder(folder)
        with folder_lock(folder / "lock", 10.0):
            if (folder / "crl.pem").exists():
                if if_absent:
                    return cls(folder, clock=clock)
                raise ConfigError("sync ca init", "--ca", f"{folder} has a CA, which is not replaced", "a new folder")
            if not (folder / "ca.key").exists():
                write_private(folder / "ca.key", new_key())
            key = read_private(folder / "ca.key", "sync ca")
            name = f"Outrider CA {public_key_of(key)[-4:].hex()}"
            write_atomic(folder / "ca.pem", new_root(key, name, now=clock.now(), life=ROOT_LIFE))
            authority = cls(folder, clock=clock)
            with authority._ledger.transaction() as entries:
                authority._write_list(entries)
        return authority

    def new_token(self, node: str, *, group: str = "default", ttl_s: float = 3600.0) -> str:
        """Lets one device enrol under that name, once. Kept here as a hash."""
        grant = Grant(node=check_name(node), group=check_name(group, "group"))
        with self._ledger.transaction() as entries:
            return entries.new_token(grant, now=self._clock.now(), ttl_s=ttl_s)

    def enrol(self, request: bytes, token: str) -> bytes:
        """A certificate for the key that signed the request. Raises `IdentityRefused`."""
        asked = read_request(request)
        with self._ledger.transaction() as entries:
            grant = entries.redeem(token, asked.public_key, now=self._clock.now())
            if asked.name != grant.node:
                raise IdentityRefused(asked.name, "the enrolment token is for a node of another name")
            return self._issue(entries, asked.public_key, grant.node, use=Use.NODE, group=grant.group)

    def renew(self, request: bytes, shown: bytes) -> bytes:
        """A certificate for a new key of the node that shows a good one (TLS has seen that it holds its key)."""
        asked, facts = read_request(request), read_certificate(shown)
        if facts.name.startswith(OWN_PREFIX):
            raise IdentityRefused(facts.name, "only nodes renew their certificates here")
        if asked.name != facts.name:
            raise IdentityRefused(asked.name, f"node {facts.name!r} asks for another one's certificate")
        with self._ledger.transaction() as entries:  # a revocation comes before or after, never in between
            if not entries.is_good(facts.serial):
                raise IdentityRefused(facts.name, "its certificate was revoked, or this CA does not know it")
            return self._issue(entries, asked.public_key, facts.name, use=Use.NODE, group=facts.group)

    def server(self, name: str, hosts: Sequence[str]) -> Path:
        """Folder with `identity.pem` (key and certificate) for a process of ours; issued anew when it is due."""
        folder = self.folder / "servers" / name
        path = folder / "identity.pem"
        private_folder(folder)
        if self._is_fresh(path, folder / "hosts", hosts):
            return folder
        with folder_lock(self.folder / "lock", 10.0):
            if not self._is_fresh(path, folder / "hosts", hosts):  # another process may have been quicker
                key = new_key()
                with self._ledger.transaction() as entries:
                    made = self._issue(entries, public_key_of(key), name, use=Use.SERVER, hosts=hosts)
                write_private(path, key + made)
                write_atomic(folder / "hosts", "\n".join(hosts).encode())
        return folder

    def revoke(self, what: str) -> tuple[list[str], list[Path]]:
        """A node by name (everything it has) or one serial. Returns the serials, and the lists that were written."""
        with self._ledger.transaction() as entries:
            serials = entries.revoke(what, now=self._clock.now())
            return serials, self._write_list(entries)

    def export_list(self, path: Path) -> None:
        """Writes the revocation list there, now and after each revocation."""
        with self._ledger.transaction() as entries:
            entries.add_export(path.absolute())
            self._write_list(entries)

    def deny_list(self) -> DenyList:
        return DenyList(self.list_file, self.root, now=self._clock.now)

    def _issue(
        self, entries: Entries, public_key: bytes, name: str, *, use: Use, group: str = "", hosts: Sequence[str] = ()
    ) -> bytes:
        life = self._node_life if use is Use.NODE else SERVER_LIFE
        made = self._issuer().issue(
            public_key, name, use=use, now=self._clock.now(), life=life, group=group, hosts=hosts
        )
        entries.add(read_certificate(made))
        return made

    def _issuer(self) -> Issuer:
        return Issuer(certificate=self.root, key=read_private(self.folder / "ca.key", "sync ca"))

    def _write_list(self, entries: Entries) -> list[Path]:
        now = self._clock.now()
        number, made = entries.next_list(made=now - SKEW)
        data = self._issuer().revocations(entries.revoked(now=now), now=made, number=number)
        write_atomic(self.list_file, data)
        written = [self.list_file]
        for path in entries.exports():
            try:
                write_atomic(path, data)
                written.append(path)
            except OSError as exc:  # a revocation counts here, whatever becomes of the copies
                logger.error("the revocation list %s cannot be written: %s", path, exc.strerror)
        return written

    def _is_fresh(self, path: Path, hosts_file: Path, hosts: Sequence[str]) -> bool:
        try:
            pem = read_private(path, "sync ca")
            facts = read_certificate(pem)
            is_same = hosts_file.read_bytes() == "\n".join(hosts).encode()
        except (OSError, ConfigError, IdentityRefused):
            return False
        is_young = facts.begins <= self._clock.now() < facts.renew_at()
        if not is_same or not is_young or not is_issued_by(pem, self.root):
            return False
        with self._ledger.transaction() as entries:
            return entries.is_good(facts.serial)


def names_of(host: str, more: Sequence[str]) -> tuple[str, ...]:
    """What a server on `host` is called: that, this machine, and what else its clients use."""
    bound = (socket.gethostname(),) if host in ("0.0.0.0", "::", "") else (host,)  # noqa: S104
    return tuple(dict.fromkeys((*bound, "localhost", "127.0.0.1", *more)))
