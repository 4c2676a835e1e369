"""What the nodes said of themselves, for `outrider sync fleet`: names, versions, last contact.

One SQLite file beside the service; bounded per node. Nothing in it decides anything, and losing it loses nothing: each
node says it again at its next poll.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from common.errors import FolderUnusable

DATABASE: Final = "fleet.db"
MAX_MODELS: Final = 256  # of one node
MAX_NAME: Final = 128
MAX_TEXT: Final = 500  # characters of a reason
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS nodes (node TEXT PRIMARY KEY, at REAL NOT NULL, problem TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS models (
    node TEXT NOT NULL, model TEXT NOT NULL, state TEXT NOT NULL, code TEXT NOT NULL, reason TEXT NOT NULL,
    version TEXT NOT NULL, active TEXT NOT NULL, epoch INTEGER NOT NULL, PRIMARY KEY (node, model)
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """One model on one node; empty strings for what there is not."""

    model: str
    state: str
    code: str
    reason: str
    version: str
    active: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """`at`: seconds since 1970, by the service's clock. `problem`: of the node's last poll."""

    node: str
    at: float
    problem: str
    models: tuple[ModelReport, ...]

    def to_dict(self) -> dict[str, Any]:
        models = [{field.name: getattr(one, field.name) for field in fields(one)} for one in self.models]
        return {"node": self.node, "last_contact": self.at, "problem": self.problem, "models": models}


def problem_of(node: str, models: Sequence[ModelReport]) -> str | None:
    """What is wrong with a report; None where it is sound."""
    names = [one.model for one in models]
    if not _is_name(node) or not all(map(_is_name, names)):
        return f"names must have 1..{MAX_NAME} printable characters"
    if len(names) > MAX_MODELS or len(set(names)) != len(names):
        return f"at most {MAX_MODELS} models, each once"
    return None


class Fleet:
    """Thread-safe. `path` None: in memory."""

    def __init__(self, path: Path | None, *, now: Callable[[], float] = time.time) -> None:
        """Raises `FolderUnusable`."""
        self._lock, self._now = threading.Lock(), now
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=OFF")  # a lost report comes again
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as exc:
            raise FolderUnusable(str(path), str(exc)) from exc

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def report(self, node: str, models: Sequence[ModelReport], problem: str) -> None:
        """Replaces what this node said before. The report is sound (`problem_of`)."""
        rows = []
        for one in models:
            texts = map(_cut, (one.state, one.code, one.reason, one.version, one.active))
            rows.append((node, one.model, *texts, one.epoch))
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?)", (node, self._now(), _cut(problem)))
            self._db.execute("DELETE FROM models WHERE node = ?", (node,))
            self._db.executemany("INSERT INTO models VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)


def read_fleet(path: Path) -> list[NodeReport]:
    """Every node, by name; beside a service that writes. Raises `FolderUnusable`."""
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            models: dict[str, list[ModelReport]] = {}
            for node, model, state, code, reason, version, active, epoch in db.execute(
                "SELECT * FROM models ORDER BY node, model"
            ):
                one = ModelReport(
                    model=model, state=state, code=code, reason=reason, version=version, active=active, epoch=epoch
                )
                models.setdefault(node, []).append(one)
            return [
                NodeReport(node=node, at=at, problem=problem, models=tuple(models.get(node, ())))
                for node, at, problem in db.execute("SELECT * FROM nodes ORDER BY node")
            ]
        finally:
            db.close()
    except sqlite3.Error as exc:
        raise FolderUnusable(str(path), str(exc)) from exc


def _is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME and text.isprintable()


def _cut(text: str) -> str:
    return text[:MAX_TEXT]
