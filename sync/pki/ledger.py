"""What a CA has to remember, in one SQLite file: tokens (their hashes alone), certificates issued, what is revoked.

Each operation is one transaction, so the command line and a running service may use it at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from common.errors import ConfigError, IdentityRefused
from sync.pki.certificates import Facts

TOKEN_PREFIX: Final = "outrider-enrol-"  # noqa: S105  # what a token begins with, for secret scanners
_WAIT_S: Final = 10.0
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS tokens (
  hash TEXT PRIMARY KEY, node TEXT NOT NULL, node_group TEXT NOT NULL, expires REAL NOT NULL, used_by TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS issued (
  serial TEXT PRIMARY KEY, name TEXT NOT NULL, node_group TEXT NOT NULL, begins REAL NOT NULL, ends REAL NOT NULL,
  revoked REAL
) STRICT;
CREATE INDEX IF NOT EXISTS issued_name ON issued (name);
CREATE TABLE IF NOT EXISTS lists (number INTEGER PRIMARY KEY, made REAL NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS exports (path TEXT PRIMARY KEY) STRICT;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Whom a token lets in."""

    node: str
    group: str


class Ledger:
    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Entries]:
        """One writer at a time; what the block did is durable when it has ended well, and undone when it has not."""
        try:
            with contextlib.closing(sqlite3.connect(self._path, timeout=_WAIT_S, isolation_level=None)) as db:
                db.execute("PRAGMA synchronous = FULL")
                db.execute("BEGIN IMMEDIATE")
                try:
                    for statement in _SCHEMA.split(";"):
                        db.execute(statement)
                    yield Entries(db)
                except BaseException:
                    db.execute("ROLLBACK")
                    raise
                db.execute("COMMIT")
        except sqlite3.Error as exc:
            problem = f"cannot be used: {exc}"
            raise ConfigError("sync ca", str(self._path), problem, "a CA's folder, open to writing") from exc


class Entries:
    """The rows within one transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def new_token(self, grant: Grant, *, now: datetime, ttl_s: float) -> str:
        token = TOKEN_PREFIX + secrets.token_urlsafe(32)
        self._db.execute("DELETE FROM tokens WHERE expires < ?", (now.timestamp(),))
        row = (_hash(token), grant.node, grant.group, now.timestamp() + ttl_s)
        self._db.execute("INSERT INTO tokens (hash, node, node_group, expires) VALUES (?, ?, ?, ?)", row)
        return token

    def redeem(self, token: str, public_key: bytes, *, now: datetime) -> Grant:
        """Uses the token up. The same key may come back with it while it lasts: its answer may have been lost.

        Raises `IdentityRefused`.
        """
        query = "SELECT node, node_group, expires, used_by FROM tokens WHERE hash = ?"
        found = self._db.execute(query, (_hash(token),)).fetchone()
        if found is None:
            raise IdentityRefused("enrolment token", "not known here")
        node, group, expires, used_by = found
        if now.timestamp() >= expires:
            raise IdentityRefused(node, "the enrolment token has expired")
        key = hashlib.sha256(public_key).hexdigest()
        if used_by not in (None, key):
            raise IdentityRefused(node, "the enrolment token was used before, by another key")
        self._db.execute("UPDATE tokens SET used_by = ? WHERE hash = ?", (key, _hash(token)))
        return Grant(node=node, group=group)

    def add(self, facts: Facts) -> None:
        row = (facts.serial, facts.name, facts.group, facts.begins.timestamp(), facts.ends.timestamp())
        self._db.execute("INSERT INTO issued (serial, name, node_group, begins, ends) VALUES (?, ?, ?, ?, ?)", row)

    def is_good(self, serial: str) -> bool:
        """Issued here, and not revoked."""
        found = self._db.execute("SELECT revoked FROM issued WHERE serial = ?", (serial,)).fetchone()
        return found is not None and found[0] is None

    def revoke(self, what: str, *, now: datetime) -> list[str]:
        """By a node's name (its open tokens die, too) or by one serial; returns the serials that this concerns."""
        of_node = self._db.execute("SELECT serial FROM issued WHERE name = ?", (what,)).fetchall()
        of_node = of_node or self._db.execute("SELECT serial FROM issued WHERE serial = ?", (_serial(what),)).fetchall()
        cancelled = self._db.execute("DELETE FROM tokens WHERE node = ?", (what,)).rowcount
        if not of_node and not cancelled:
            raise IdentityRefused(what, "this CA has issued nothing to a node, or under a serial, of that name")
        for (serial,) in of_node:
            update = "UPDATE issued SET revoked = ? WHERE serial = ? AND revoked IS NULL"
            self._db.execute(update, (now.timestamp(), serial))
        return [serial for (serial,) in of_node]

    def revoked(self, *, now: datetime) -> list[tuple[str, datetime]]:
        """Those that would still be in force; the others have expired by themselves, a day ago at least."""
        query = "SELECT serial, revoked FROM issued WHERE revoked IS NOT NULL AND ends > ? ORDER BY revoked, serial"
        found = self._db.execute(query, (now.timestamp() - 86_400,)).fetchall()
        return [(serial, datetime.fromtimestamp(when, UTC)) for serial, when in found]

    def next_list(self, *, made: datetime) -> tuple[int, datetime]:
        """Number and time of the next revocation list: each is later than the last, or OpenSSL keeps the old one."""
        found = self._db.execute("SELECT number, made FROM lists ORDER BY number DESC LIMIT 1").fetchone()
        number, last = found or (0, 0.0)
        at = max(int(made.timestamp()), int(last) + 1)
        self._db.execute("DELETE FROM lists")
        self._db.execute("INSERT INTO lists (number, made) VALUES (?, ?)", (number + 1, at))
        return number + 1, datetime.fromtimestamp(at, UTC)

    def add_export(self, path: Path) -> None:
        self._db.execute("INSERT OR IGNORE INTO exports (path) VALUES (?)", (str(path),))

    def exports(self) -> list[Path]:
        """Where others read the revocation list."""
        return [Path(path) for (path,) in self._db.execute("SELECT path FROM exports ORDER BY path")]


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _serial(text: str) -> str:
    return text.lower().replace(":", "").lstrip("0")
