"""Why a node serves what it serves: its journal in words, for `outrider sync why`.

Only reads, beside an agent that is at work or without one. The journal is the whole truth: there is nothing to ask. But
a full disk keeps the agent from writing it: that is seen by looking at the disk.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.errors import ConfigError, FolderUnusable, SyncError
from sync.agent.journal import Journal, Poll, Transition, journal_copy
from sync.agent.reasons import WAY_OUT
from sync.agent.space import SPARE_BYTES
from sync.agent.states import Code, Record, State

JOURNAL = "journal.db"
_SHOWN = 8  # transitions on a screen


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """One model on one node. Times are seconds since 1970."""

    record: Record
    transitions: Sequence[Transition]
    counters: Mapping[str, int]
    free_bytes: int  # of the disk with the journal
    poll: Poll | None  # the last one; None: there was none

    @property
    def is_disk_full(self) -> bool:
        return self.free_bytes < SPARE_BYTES

    def to_dict(self) -> dict[str, Any]:
        one, desired = self.record, self.record.desired
        return {
            "model": one.model,
            "desired": None if desired is None else {"version": desired.version, "epoch": desired.epoch},
            "active": one.active,
            "previous": one.previous,
            "state": one.state,
            "version": one.version,
            "code": one.code,
            "reason": one.reason,
            "way_out": WAY_OUT[one.code],
            "attempts": one.attempts,
            "not_before": one.not_before,
            "probation_ends": one.deadline,
            "transitions": [
                {
                    "at": each.at,
                    "old": each.old,
                    "new": each.new,
                    "version": each.version,
                    "code": each.code,
                    "reason": each.reason,
                }
                for each in self.transitions
            ],
            "counters": dict(self.counters),
            "free_bytes": self.free_bytes,
            "poll": poll_to_dict(self.poll),
        }


def find_journal(node: Path) -> Path:
    """`node`: a node's state folder, or the `sync` folder in it. Raises `ConfigError`."""
    for folder in (node, node / "sync"):
        if (folder / JOURNAL).is_file():
            return folder / JOURNAL
    raise ConfigError("sync why", "NODE", f"{node} has no {JOURNAL}", "a node's state folder, or its `sync` folder")


def why(journal: Path, model: str | None = None) -> tuple[Why, ...]:
    """Every model that the node knows of, or `model`. Raises `SyncError` where the journal cannot be read."""
    disk = os.statvfs(journal.parent)
    with _reader(journal) as found:
        try:
            return tuple(
                Why(
                    record=one,
                    transitions=found.transitions(one.model),
                    counters=found.counters(one.model),
                    free_bytes=disk.f_bavail * disk.f_frsize,
                    poll=found.poll(),
                )
                for one in found.records()
                if model in (None, one.model)
            )
        except sqlite3.Error as exc:
            raise SyncError(f"{journal} cannot be read: {exc}") from exc


def last_poll(journal: Path) -> Poll | None:
    """Of the node as a whole: there may be no model yet. Raises as `why`."""
    with _reader(journal) as found:
        try:
            return found.poll()
        except sqlite3.Error as exc:
            raise SyncError(f"{journal} cannot be read: {exc}") from exc


def poll_to_dict(poll: Poll | None) -> dict[str, Any] | None:
    return None if poll is None else {"at": poll.at, "through_at": poll.through_at, "problem": poll.problem}


def poll_line(poll: Poll | None) -> str:
    if poll is None:
        return "none yet"
    if not poll.problem:
        return f"{_time(poll.at)}, got through"
    through = "none before got through" if poll.through_at is None else f"the last that did: {_time(poll.through_at)}"
    return f"{_time(poll.at)} did NOT get through ({through}): {poll.problem}"


@contextmanager
def _reader(path: Path) -> Iterator[Journal]:
    """Where no agent is at work, SQLite wants to write beside what it reads; on a full disk a copy is read."""
    try:
        journal = Journal.reader(path)
    except FolderUnusable:
        with journal_copy(path.parent) as copy, closing(Journal.reader(copy)) as journal:
            yield journal
        return
    with closing(journal):
        yield journal


def screen(one: Why) -> list[str]:
    """Lines for a terminal."""
    record, desired = one.record, one.record.desired
    wanted = "nothing yet" if desired is None else f"version {desired.version} (epoch {desired.epoch})"
    lines = [
        f"{record.model}",
        f"  desired    {wanted}",
        f"  serves     {'nothing here: the cloud answers' if record.active is None else f'version {record.active}'}",
        f"  state      {_state(record)}",
        f"  reason     {_reason(record)}",
        f"  changes    {WAY_OUT[record.code]}",
        f"  next try   {_next_try(record)}",
        f"  last poll  {poll_line(one.poll)}",
    ]
    if one.is_disk_full:
        lines.append(
            f"  disk       full, {one.free_bytes:,} bytes free: nothing new is fetched, installed or noted here"
        )
    if one.transitions:
        lines.append("  last")
    for each in one.transitions[:_SHOWN]:
        said = f"  {each.code} {each.reason}".rstrip()
        lines.append(f"    {_time(each.at)}  {each.old} -> {each.new}  version {each.version or '-'}{said}")
    return lines


def _state(record: Record) -> str:
    return record.state if record.version is None else f"{record.state} version {record.version}"


def _reason(record: Record) -> str:
    words = record.reason or ("it is desired" if record.code is Code.SERVES else "-")
    return f"{record.code}: {words}" if record.code else words


def _next_try(record: Record) -> str:
    if record.state is State.PROBATION and record.deadline is not None:
        return f"probation ends at {_time(record.deadline)}"
    if record.state is State.WAITING and record.not_before is not None:
        return f"at {_time(record.not_before)}"
    if record.state in (State.QUARANTINED, State.CLOUD_ONLY):
        return "not this content: it was refused for good"
    if record.code is Code.SERVES:
        return "each poll looks for something newer"
    return "at the next poll; after failures sooner than the interval"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
