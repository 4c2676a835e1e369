"""Logging: the set-up of a process, and the hook that writes a line for the events that people want to read.

Owns the two forms (JSON lines, text) and what is notable: fallbacks, swaps, faults; never each call, never payloads. A
fault that repeats is one line a second with the number of those left out.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

from common.clock import Clock, SystemClock
from common.errors import EngineError
from common.telemetry.events import CacheFault, EngineSwapped, KindHook, RequestDone, TargetFailed

Form = Literal["json", "text"]

_EVERY_S = 1.0
_MAX_KEYS = 1024
_MAX_TEXT = 2000  # characters of a field
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_log = logging.getLogger("outrider")


def set_up(form: Form, *, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """One handler on the root logger, to stderr unless `stream` is given; replaces what was there."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonLines() if form == "json" else _Text())
    logging.basicConfig(level=level, handlers=[handler], force=True)


class EventLog(KindHook):
    """The hook. `register` adds a line for a kind of event of another package."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()
        self._clock = clock or SystemClock()
        self.register(RequestDone, self._request_done)
        self.register(TargetFailed, self._target_failed)
        self.register(CacheFault, self._cache_fault)
        self.register(EngineSwapped, self._engine_swapped)
        self._last: dict[tuple[str, ...], tuple[float, int]] = {}

    def limited(self, message: str, level: int, *, key: tuple[str, ...] = (), **fields: object) -> None:
        """Logs at most once a second for the same message and key; says how many were left out."""
        now, key = self._clock.monotonic(), tuple(map(_cut, key))
        if len(self._last) >= _MAX_KEYS:
            self._last.clear()
        last, left_out = self._last.get((message, *key), (-_EVERY_S, 0))
        if now - last < _EVERY_S:
            self._last[message, *key] = (last, left_out + 1)
            return
        self._last[message, *key] = (now, 0)
        log(message, level, **fields, **({"left_out": left_out} if left_out else {}))

    def _request_done(self, event: RequestDone) -> None:
        if event.error == EngineError.__name__:
            self.limited("call failed", logging.ERROR, key=(event.model,), model=event.model, request=event.request_id)

    def _cache_fault(self, event: CacheFault) -> None:
        if event.is_new:
            self.limited("cache fault", logging.WARNING, problem=event.problem)

    def _target_failed(self, event: TargetFailed) -> None:
        self.limited(
            "target did not answer",
            logging.WARNING,
            key=(event.model, event.target),
            model=event.model,
            target=event.target,
            error=event.error,
            request=event.request_id,
        )

    def _engine_swapped(self, event: EngineSwapped) -> None:
        log("engine swapped", model=event.model, old=event.old_version, new=event.new_version)


def log(message: str, level: int = logging.INFO, **fields: object) -> None:
    """A line with fields: keys of their own in JSON, ``key=value`` behind the message in text."""
    _log.log(level, message, extra={"fields": fields})


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in _fields(record).items() if name not in line}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        line = super().formatMessage(record) + "".join(f" {k}={v}" for k, v in _fields(record).items())
        return _CONTROL.sub(_escaped, line)  # a value cannot start a line of its own, or speak to a terminal


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return {name: _cut(value) if isinstance(value, str) else value for name, value in fields.items()}


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
