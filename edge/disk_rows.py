"""The database of the disk cache: rows of answers in a folder, each framed with its digest, oldest out first.

diskcache keeps the rows; its default would unpickle values, follow file names that a row gives, and take its settings
and its clock from elsewhere. Here only inline bytes go in or come out, what else is found in the file is removed
before the library sees it, and no decision reads the wall clock. Blocking; for one thread. Only importer of diskcache.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import MODE_RAW

from common.clock import BootClock, Moment
from common.config import from_json, to_json
from common.errors import OutriderError
from common.request import Response
from common.tensors import Tensors, datatype_of, pack, unpack

MAX_ANSWER_BYTES = 4 << 20
BUSY_S = 0.25  # how long a statement waits for another process that holds the database

_FILE = "cache.db"
_MAGIC = b"OAC3"
_CACHED_PAGES = 512  # 2 MiB in this process, for the library's 32: the kernel keeps the file's pages anyway
_INLINE = 1 << 40  # diskcache moves larger values to files: none is
_WAL_BYTES = 1 << 20  # when it is carried over into the database; of a small quota, a sixteenth
_MY_TABLES = frozenset({"Cache", "Settings"})
_FOREIGN = """
    DELETE FROM Cache WHERE NOT (
        raw IS 1 AND mode IS 1 AND size IS 0 AND filename IS NULL AND tag IS NULL AND expire_time IS NULL
        AND typeof(key) IS 'text' AND typeof(value) IS 'blob' AND length(value) <= ?
    )"""

# By the order in which rows were written, which a clock that is set back cannot change. The library asks for ten at a
# time until there is room: of large ones that would be far more than is needed, so no more follow after 16 KiB.
_OLDEST_FIRST = "oldest-rowid-first"
diskcache.EVICTION_POLICY[_OLDEST_FIRST] = {
    "init": None,
    "get": None,
    "cull": "SELECT {fields} FROM (SELECT rowid, filename, sum(bytes) OVER (ORDER BY rowid) - bytes AS before"
    " FROM (SELECT rowid, filename, length(value) AS bytes FROM Cache ORDER BY rowid LIMIT ?)) WHERE before < 16384",
}


class BadRow(Exception):
    """A row that this cache did not write, or that is damaged: it is gone when this is raised. Or an answer of a form
    that no row can have."""


class Damaged(Exception):
    """A file that is not the database that this cache makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A stored answer. `age_s`: how old it is."""

    outputs: Tensors
    age_s: float


class AnswerRows:
    """Opens the database in `folder`, which must exist; `removed` says how many foreign rows it had.

    Raises the errors of `sqlite3` and diskcache, OSError, and `Damaged`; `is_damage` says for which of them a new
    database is the cure.
    """

    def __init__(self, folder: Path, quota_bytes: int, clock: BootClock) -> None:
        self._clock = clock
        self._max_bytes = min(MAX_ANSWER_BYTES, quota_bytes // 7)
        wal_bytes = min(_WAL_BYTES, quota_bytes // 16)
        self._path = folder / _FILE
        self.removed = _clean(self._path)
        self._rows = diskcache.Cache(
            str(folder),
            timeout=BUSY_S,
            disk=_RawDisk,
            disk_min_file_size=_INLINE,
            eviction_policy=_OLDEST_FIRST,
            cull_limit=0,  # `write` makes room for as much as it added
            size_limit=quota_bytes - 2 * wal_bytes - self._max_bytes,
            statistics=0,
            sqlite_synchronous=0,
            sqlite_cache_size=_CACHED_PAGES,
            sqlite_mmap_size=0,  # a file that somebody cuts short under a mapping would end the process
            sqlite_wal_autocheckpoint=wal_bytes // 4096,
            sqlite_journal_size_limit=wal_bytes,
        )

    def close(self) -> None:
        self._rows.close()

    def read(self, key: str, model: str, version: str, ttl_s: float, identity: str = "") -> Found | None:
        """The answer under `key`, which is for this model, version and identity, if it is younger than `ttl_s`."""
        try:
            data = self._rows.get(key)
            if data is None:
                return None
            written, outputs = _decode(data, (key, model, version, identity))
        except (BadRow, OutriderError, ValueError, LookupError, struct.error) as exc:
            self._rows.delete(key)
            raise BadRow(str(exc)) from exc
        age_s = written.age_s(self._clock.moment())
        if 0 <= age_s < ttl_s:
            return Found(outputs=outputs, age_s=age_s)
        self._rows.delete(key)
        return None

    def keys_after(self, key: str, limit: int) -> list[str]:
        """The next ones in their order; a page at a time, each by itself, so that no long read holds the WAL."""
        page = "SELECT key FROM Cache WHERE key > ? AND typeof(key) IS 'text' ORDER BY key LIMIT ?"
        with contextlib.closing(sqlite3.connect(self._path, timeout=BUSY_S)) as db:
            return [key for (key,) in db.execute(page, (key, limit))]

    def write(self, key: str, response: Response) -> None:
        """Nothing where the answer is larger than a seventh of the quota, or than `MAX_ANSWER_BYTES`."""
        try:
            data = _encode(response, key, self._clock.moment())
        except (OutriderError, ValueError, TypeError, LookupError) as exc:
            raise BadRow(f"not stored: {exc}") from exc
        if len(data) <= self._max_bytes:
            self._rows.set(key, data)
            self._rows.cull()


def open_rows(folder: Path, quota_bytes: int, clock: BootClock) -> AnswerRows:
    """Makes the folder (mode 0700) and the database where there is none."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    return AnswerRows(folder, quota_bytes, clock)


def discard(folder: Path) -> None:
    """Removes the database. Raises OSError."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        (folder / f"{_FILE}{suffix}").unlink(missing_ok=True)


def is_damage(exc: Exception) -> bool:
    """Whether the file is at fault, and not a disk that is full, read-only or slow."""
    if isinstance(exc, sqlite3.OperationalError):
        return any(text in str(exc) for text in ("no such ", "has no column", "disk I/O error"))
    return not isinstance(exc, OSError | diskcache.Timeout | BadRow)


def _clean(path: Path) -> int:
    """Removes what others wrote into the database: rows of other forms (their number is returned), settings (each
    would become an attribute or a statement of the library's) and triggers. Raises `Damaged` for tables of others."""
    if path.is_symlink():
        path.unlink()
    with contextlib.closing(sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)) as db:
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute("BEGIN IMMEDIATE")
        schema = db.execute("SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'").fetchall()
        tables = {name for kind, name in schema if kind == "table"}
        if not schema:
            return 0
        if tables != _MY_TABLES or any(kind == "view" for kind, _ in schema):
            raise Damaged(f"a database of other tables: {', '.join(sorted(map(str, tables)))[:200]}")
        for kind, name in schema:
            if kind == "trigger":
                db.execute('DROP TRIGGER "{}"'.format(name.replace('"', '""')))
        db.execute("DELETE FROM Settings")
        removed = db.execute(_FOREIGN, (MAX_ANSWER_BYTES,)).rowcount
        db.execute("COMMIT")
        return removed


class _RawDisk(diskcache.Disk):  # type: ignore[misc]
    """Inline raw bytes under text keys and nothing else: no pickles, no files."""

    def put(self, key: Any) -> tuple[Any, bool]:
        if not isinstance(key, str):
            raise BadRow(f"key of type {type(key).__name__}")
        return key, True

    def get(self, key: Any, raw: bool) -> Any:
        if not raw or not isinstance(key, str):
            raise BadRow("a key that is not text")
        return key

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, None, Any]:
        if not isinstance(value, bytes):
            raise BadRow(f"value of type {type(value).__name__}")
        return 0, MODE_RAW, None, sqlite3.Binary(value)

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> bytes:
        if mode != MODE_RAW or filename is not None or not isinstance(value, bytes):
            raise BadRow("a row that is not inline bytes")
        if len(value) > MAX_ANSWER_BYTES:
            raise BadRow(f"a row of {len(value)} bytes")
        return value

    def filename(self, key: Any = None, value: Any = None) -> tuple[str, str]:
        raise BadRow("values are never kept in files")

    def remove(self, file_path: str) -> None:
        """Rows of ours have no files; a planted file name is not followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    name: str
    datatype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    key: str
    model: str
    version: str
    identity: str
    written: Moment
    tensors: tuple[_Tensor, ...]


def _encode(response: Response, key: str, now: Moment) -> bytes:
    """magic, SHA-256 of the rest, header length, JSON header, tensors."""
    parts = [pack(array) for array in response.outputs.values()]
    tensors = tuple(
        _Tensor(name=name, datatype=datatype_of(array), shape=array.shape, bytes=len(part))
        for (name, array), part in zip(response.outputs.items(), parts, strict=True)
    )
    stamp = response.stamp
    header = _Header(
        key=key, model=stamp.model, version=stamp.version, identity=stamp.identity, written=now, tensors=tensors
    )
    text = to_json(header)
    body = b"".join((struct.pack("<I", len(text)), text, *parts))
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(data: bytes, whose: tuple[str, str, str, str]) -> tuple[Moment, Tensors]:
    """When the answer was written, and its outputs. `whose`: key, model, version, identity."""
    if data[:4] != _MAGIC or hashlib.sha256(data[36:]).digest() != data[4:36]:
        raise BadRow("digest does not match")
    (length,) = struct.unpack_from("<I", data, 36)
    offset = 40 + length
    header = from_json(data[40:offset], _Header, "cached answer")
    if (header.key, header.model, header.version, header.identity) != whose:
        raise BadRow("the answer to another request")
    outputs = {}
    for tensor in header.tensors:
        part = data[offset : offset + tensor.bytes]
        outputs[tensor.name] = unpack(part, tensor.datatype, tensor.shape, tensor.name)
        offset += tensor.bytes
    return header.written, outputs
