"""The agent's only truth: one SQLite database (WAL, synchronous=FULL). What it does not say did not happen.

Entering a state is one transaction together with everything the state promises. Each row carries a digest: one that is
not what was written is damage, even where it makes sense. Thread-safe: the agent's thread writes, anybody may read a
status.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

from common.config import from_json, to_json
from common.errors import ConfigError, FolderUnusable, SyncError
from sync.agent.states import Code, Record, State, check_move
from sync.release import Desired, Manifest

# Each entry takes the schema one version further; never edited, only appended to.
_MIGRATIONS: Final = (
    """
    CREATE TABLE floors (role TEXT PRIMARY KEY, version INTEGER NOT NULL);
    CREATE TABLE models (
        model TEXT PRIMARY KEY, state TEXT NOT NULL, version TEXT, digest TEXT, reason TEXT NOT NULL,
        attempts INTEGER NOT NULL, active TEXT, previous TEXT, desired BLOB
    );
    CREATE TABLE releases (
        model TEXT NOT NULL, version TEXT NOT NULL, variant TEXT NOT NULL, engine TEXT NOT NULL,
        manifest BLOB NOT NULL, PRIMARY KEY (model, version)
    );
    CREATE TABLE quarantine (
        model TEXT NOT NULL, digest TEXT NOT NULL, plan TEXT NOT NULL, version TEXT NOT NULL, reason TEXT NOT NULL,
        PRIMARY KEY (model, digest, plan)
    );
    CREATE TABLE counters (
        model TEXT NOT NULL, name TEXT NOT NULL, value INTEGER NOT NULL, PRIMARY KEY (model, name)
    );
    """,
    """
    ALTER TABLE models ADD COLUMN code TEXT NOT NULL DEFAULT '';
    ALTER TABLE models ADD COLUMN starts INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE models ADD COLUMN not_before REAL;
    ALTER TABLE models ADD COLUMN deadline REAL;
    CREATE TABLE transitions (
        id INTEGER PRIMARY KEY, model TEXT NOT NULL, at REAL NOT NULL, old TEXT NOT NULL, new TEXT NOT NULL,
        version TEXT, code TEXT NOT NULL, reason TEXT NOT NULL
    );
    CREATE INDEX transitions_of_model ON transitions (model, id);
    """,
    """
    ALTER TABLE floors ADD COLUMN seal BLOB;
    ALTER TABLE models ADD COLUMN seal BLOB;
    ALTER TABLE releases ADD COLUMN seal BLOB;
    ALTER TABLE quarantine ADD COLUMN seal BLOB;
    ALTER TABLE counters ADD COLUMN seal BLOB;
    ALTER TABLE transitions ADD COLUMN seal BLOB;
    """,
    """
    CREATE TABLE polls (name TEXT PRIMARY KEY, at REAL NOT NULL, through_at REAL, problem TEXT NOT NULL, seal BLOB);
    """,
)
_SEALED_SINCE: Final = 3


@dataclass(frozen=True, slots=True)
class _Table:
    """A table whose rows carry a seal over `columns`, in this order."""

    name: str
    columns: str

    @property
    def select(self) -> str:
        return f"SELECT {self.columns} FROM {self.name}"  # noqa: S608  # of constants, here and below

    @property
    def broken(self) -> str:
        return f"SELECT 1 FROM {self.name} WHERE seal IS NOT seal('{self.name}', {self.columns})"  # noqa: S608

    @property
    def whole(self) -> str:
        return f"{self.select} NOT INDEXED WHERE seal IS seal('{self.name}', {self.columns})"

    @property
    def insert(self) -> str:
        marks = ", ".join("?" * (self.columns.count(",") + 2))
        return f"INSERT OR REPLACE INTO {self.name} ({self.columns}, seal) VALUES ({marks})"  # noqa: S608

    @property
    def first_seal(self) -> str:
        return f"UPDATE {self.name} SET seal = seal('{self.name}', {self.columns});"  # noqa: S608


_FLOORS: Final = _Table("floors", "role, version")
_MODELS: Final = _Table(
    "models",
    "model, state, version, digest, reason, attempts, active, previous, desired, code, starts, not_before, deadline",
)
_RELEASES: Final = _Table("releases", "model, version, variant, engine, manifest")
_QUARANTINE: Final = _Table("quarantine", "model, digest, plan, version, reason")
_COUNTERS: Final = _Table("counters", "model, name, value")
_TRANSITIONS: Final = _Table("transitions", "model, at, old, new, version, code, reason")
_POLLS: Final = _Table("polls", "name, at, through_at, problem")
_UNSEALED_BEFORE: Final = (_FLOORS, _MODELS, _RELEASES, _QUARANTINE, _COUNTERS, _TRANSITIONS)
_TABLES: Final = (*_UNSEALED_BEFORE, _POLLS)
logger = logging.getLogger(__name__)
_MEMORY: Final = Path("/dev/shm")  # noqa: S108  # a private folder is made in it; a full disk may be that of /tmp too
_TIME: Final = "(time)"  # among the floors: seconds since 1970; no role is called that
_POLL_EACH_S: Final = 60.0
MAX_TRANSITIONS: Final = 50  # remembered of each model


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """`at`: seconds since 1970, by this node's clock."""

    at: float
    old: str
    new: str
    version: str | None
    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """The last one that was noted: seconds since 1970 by this node's clock. `through_at`: of the last one without a
    problem."""

    at: float
    through_at: float | None
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A release whose files are (or are being put) on this node's disk."""

    manifest: Manifest
    variant: str
    engine: str

    @property
    def plan(self) -> str:
        """What was built from it: another variant or engine of the same content is another matter."""
        return f"{self.variant}/{self.engine}"

    def paths(self) -> tuple[str, ...]:
        variant = next(one for one in self.manifest.variants if one.name == self.variant)
        return self.manifest.files_for(variant, self.engine)


class Journal:
    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        """Opens or makes the database; a damaged one is set aside, and a new one begun. Raises `FolderUnusable` where
        that cannot be, later from every write too."""
        self._path, self._lock, self._now = path, threading.RLock(), now
        with self._explained():
            try:
                self._open()
            except sqlite3.OperationalError:  # locked, full, read-only: not what is in it
                raise
            except sqlite3.DatabaseError as exc:
                logger.error("journal %s is damaged (%s): set aside, what is desired is fetched again", path, exc)
                aside = _set_aside(path)
                self._open()
                self._salvage(aside)

    def _open(self) -> None:
        self._db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        with contextlib.ExitStack() as stack:
            stack.callback(self._db.close)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA wal_autocheckpoint=50")  # pages: on a full disk its log has no room to grow
            (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(found)
            self._db.create_function("seal", -1, _seal, deterministic=True)
            self._migrate(self._path)
            for table in _TABLES:
                if self._db.execute(table.broken).fetchone():
                    raise sqlite3.DatabaseError(f"a row of table {table.name} is not what was written")
            for record in self.records():
                self.releases(record.model)
            stack.pop_all()

    def _salvage(self, aside: Path) -> None:
        """Takes over what protects this node, floors and quarantine: of a damaged journal the rows that are whole."""
        found: list[tuple[_Table, tuple[Any, ...]]] = []
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(aside)) as old:
            old.create_function("seal", -1, _seal, deterministic=True)
            for table in (_FLOORS, _QUARANTINE):
                with contextlib.suppress(sqlite3.Error):
                    for row in old.execute(table.whole):
                        found.append((table, row))  # noqa: PERF401  # what came before a damaged page counts
        with self.transaction():
            for table, row in found:
                self._put(table, *row)

    def _put(self, table: _Table, *row: Any) -> None:
        """Inserts a row, or replaces it; in the order of the table's columns."""
        self._db.execute(table.insert, (*row, _seal(table.name, *row)))

    @classmethod
    def reader(cls, path: Path) -> Journal:
        """Reads beside the agent that writes, or without one; whatever would write fails. Raises `SyncError`."""
        journal = cls.__new__(cls)
        journal._path, journal._lock, journal._now = path, threading.RLock(), time.time
        with journal._explained():
            journal._db = sqlite3.connect(
                f"{path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False, isolation_level=None
            )
        with contextlib.ExitStack() as stack, journal._explained():
            stack.callback(journal._db.close)
            version = int(journal._db.execute("PRAGMA user_version").fetchone()[0])
            if version != len(_MIGRATIONS):
                raise SyncError(f"journal {path} has schema {version}, this version reads {len(_MIGRATIONS)}")
            stack.pop_all()
        return journal

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # --- models ---

    def record(self, model: str) -> Record:
        row = self._one(f"{_MODELS.select} WHERE model = ?", model)
        return Record(model=model) if row is None else _record(row)

    def records(self) -> tuple[Record, ...]:
        with self._lock:
            rows = self._db.execute(f"{_MODELS.select} ORDER BY model").fetchall()
        return tuple(map(_record, rows))

    def enter(self, record: Record, state: State, **changes: Any) -> Record:
        """Moves a model to `state`, durably. `changes` are fields of `Record`. Returns the new record."""
        check_move(record.state, state)
        new = replace(record, state=state, **changes)
        with self.transaction():
            self.save(new)
            self._remember(record, new)
        return new

    def _remember(self, old: Record, new: Record) -> None:
        self._put(_TRANSITIONS, new.model, self._now(), old.state, new.state, new.version, new.code, new.reason)
        self._db.execute(
            "DELETE FROM transitions WHERE model = ? AND id NOT IN "
            "(SELECT id FROM transitions WHERE model = ? ORDER BY id DESC LIMIT ?)",
            (new.model, new.model, MAX_TRANSITIONS),
        )

    def transitions(self, model: str) -> tuple[Transition, ...]:
        """The last of a model, newest first."""
        with self._lock:
            rows = self._db.execute(
                "SELECT at, old, new, version, code, reason FROM transitions WHERE model = ? ORDER BY id DESC", (model,)
            ).fetchall()
        return tuple(
            Transition(at=at, old=old, new=new, version=version, code=code, reason=reason)
            for at, old, new, version, code, reason in rows
        )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """What is written inside becomes durable together, or not at all."""
        with self._lock:
            if self._db.in_transaction:  # part of an outer one
                yield
                return
            with self._explained():
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:  # a full disk ends it by itself
                        self._db.execute("ROLLBACK")
                    raise

    def save(self, record: Record) -> Record:
        desired = None if record.desired is None else to_json(record.desired)
        target = (record.model, record.state, record.version, record.digest, record.reason, record.attempts)
        times = (record.code, record.starts, record.not_before, record.deadline)
        with self.transaction():
            self._put(_MODELS, *target, record.active, record.previous, desired, *times)
        return record

    # --- floors ---

    def floors(self) -> dict[str, int]:
        with self._lock:
            rows = self._db.execute("SELECT role, version FROM floors WHERE role != ?", (_TIME,)).fetchall()
        return dict(rows)

    def save_floors(self, floors: Mapping[str, int]) -> None:
        if floors != self.floors():
            with self.transaction():
                for floor in floors.items():
                    self._put(_FLOORS, *floor)

    def time_floor(self) -> datetime | None:
        """The newest time that signed metadata proved so far."""
        row = self._one("SELECT version FROM floors WHERE role = ?", _TIME)
        return None if row is None else datetime.fromtimestamp(row[0], UTC)

    def save_time_floor(self, floor: datetime | None) -> None:
        if floor is not None and floor != self.time_floor():
            with self.transaction():
                self._put(_FLOORS, _TIME, int(floor.timestamp()))

    # --- polls ---

    def poll(self) -> Poll | None:
        row = self._one(_POLLS.select)
        return None if row is None else Poll(at=row[1], through_at=row[2], problem=row[3])

    def save_poll(self, problem: str) -> None:
        """Notes that a poll has ended; one like the last one is noted once a minute."""
        now, last = self._now(), self.poll()
        if last is not None and last.problem == problem and 0 <= now - last.at < _POLL_EACH_S:
            return
        through_at = now if not problem else None if last is None else last.through_at
        with self.transaction():
            self._put(_POLLS, "last", now, through_at, problem)

    # --- releases on disk ---

    def save_release(self, release: Release) -> None:
        manifest = release.manifest
        with self.transaction():
            where = (manifest.model, manifest.version, release.variant, release.engine)
            self._put(_RELEASES, *where, to_json(manifest))

    def release(self, model: str, version: str) -> Release | None:
        row = self._one(f"{_RELEASES.select} WHERE model = ? AND version = ?", model, version)
        if row is None:
            return None
        _, _, variant, engine, manifest = row
        try:
            found = Release(manifest=from_json(manifest, Manifest, "journal"), variant=variant, engine=engine)
            found.paths()
        except (ConfigError, StopIteration, KeyError) as exc:
            raise sqlite3.DatabaseError(f"the row of release {model}/{version} makes no sense: {exc!r}") from exc
        return found

    def releases(self, model: str) -> tuple[Release, ...]:
        """Every release of a model that has files here, damaged ones too: most of their slabs may be good."""
        with self._lock:
            rows = self._db.execute("SELECT version FROM releases WHERE model = ?", (model,)).fetchall()
        return tuple(one for (version,) in rows if (one := self.release(model, version)) is not None)

    def forget_releases(self, model: str, keep: set[str]) -> None:
        with self.transaction():
            versions = {row[0] for row in self._db.execute("SELECT version FROM releases WHERE model = ?", (model,))}
            for version in versions - keep:
                self._db.execute("DELETE FROM releases WHERE model = ? AND version = ?", (model, version))

    # --- quarantine ---

    def quarantine(self, model: str, digest: str, plan: str, version: str, reason: str) -> None:
        with self.transaction():
            self._put(_QUARANTINE, model, digest, plan, version, reason)

    def quarantine_reason(self, model: str, digest: str, plan: str) -> str | None:
        query = "SELECT reason FROM quarantine WHERE model = ? AND digest = ? AND plan = ?"
        row = self._one(query, model, digest, plan)
        return None if row is None else str(row[0])

    # --- counters ---

    def count(self, model: str, counts: Mapping[str, int]) -> None:
        """Adds to a model's counters, in one transaction."""
        with self.transaction():
            before = self.counters(model)
            for name, value in counts.items():
                self._put(_COUNTERS, model, name, before.get(name, 0) + value)

    def counters(self, model: str) -> dict[str, int]:
        with self._lock:
            return dict(self._db.execute("SELECT name, value FROM counters WHERE model = ?", (model,)).fetchall())

    def _one(self, query: str, *values: str) -> tuple[Any, ...] | None:
        with self._lock:
            row: tuple[Any, ...] | None = self._db.execute(query, values).fetchone()
            return row

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise FolderUnusable(str(self._path), str(exc)) from exc

    def _migrate(self, path: Path) -> None:
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version > len(_MIGRATIONS):
            raise SyncError(f"journal {path} has schema {version}, this version reads up to {len(_MIGRATIONS)}")
        for number in range(version, len(_MIGRATIONS)):
            sealed = number + 1 == _SEALED_SINCE  # what was there before is taken as it is
            script = _MIGRATIONS[number] + " ".join(table.first_seal for table in _UNSEALED_BEFORE if sealed)
            self._db.executescript(f"BEGIN; {script} PRAGMA user_version = {number + 1}; COMMIT;")


@contextlib.contextmanager
def journal_copy(folder: Path) -> Iterator[Path]:
    """A copy of the journal in `folder`, in memory where that can be: for a disk that takes no writes."""
    with tempfile.TemporaryDirectory(prefix="outrider-", dir=_MEMORY if _MEMORY.is_dir() else None) as copy:
        for name in ("journal.db", "journal.db-wal"):
            if (folder / name).exists():
                shutil.copyfile(folder / name, Path(copy) / name)
        yield Path(copy) / "journal.db"


def _seal(*row: Any) -> bytes:
    """Of a table's name and the values of one of its rows: BLAKE3 of their MessagePack, 8 bytes. Against accidents."""
    return blake3(msgspec.msgpack.encode(row)).digest(8)


def _set_aside(path: Path) -> Path:
    """Keeps the last damaged one, for whoever wants to know, and because its floors may be whole. Its new path."""
    for suffix in ("", "-wal", "-shm"):
        file = path.with_name(path.name + suffix)
        if file.exists():
            file.replace(path.with_name(f"{path.name}.damaged{suffix}"))
    return path.with_name(f"{path.name}.damaged")


def _record(row: tuple[Any, ...]) -> Record:
    try:
        return _parsed(row)
    except (ValueError, TypeError, ConfigError) as exc:  # what no version of ours wrote
        raise sqlite3.DatabaseError(f"the row of model {row[0]!r} makes no sense: {exc}") from exc


def _parsed(row: tuple[Any, ...]) -> Record:
    model, state, version, digest, reason, attempts, active, previous, desired, code, starts, not_before, deadline = row
    return Record(
        model=model,
        state=State(state),
        version=version,
        digest=digest,
        code=Code(code),
        reason=reason,
        attempts=attempts,
        starts=starts,
        not_before=not_before,
        deadline=deadline,
        active=active,
        previous=previous,
        desired=None if desired is None else from_json(desired, Desired, "journal"),
    )
