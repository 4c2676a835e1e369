"""What the request path reports: frozen events handed to a hook. Logic emits them; metrics and logs are hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from common.request import Priority, Reason

_log = logging.getLogger(__name__)

Hook = Callable[[object], None]


def ignore(_event: object) -> None:
    """The hook of who does not listen."""


def fan_out(*hooks: Hook) -> Hook:
    """One hook for several. A hook's failure is logged: it is neither the emitter's nor the other hooks'."""

    def emit(event: object) -> None:
        for hook in hooks:
            try:
                hook(event)
            except Exception:
                _log.exception("an event hook failed on %s", type(event).__name__)

    return emit


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDone:
    """One call through the data plane ended. `error` is the error's class name, empty for an answer."""

    request_id: str
    model: str
    version: str
    target: str
    reason: Reason | None
    priority: Priority
    seconds: float
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFailed:
    """A target did not answer; the router goes on to the next step of its plan, if there is one."""

    request_id: str
    model: str
    target: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDone:
    model: str
    rows: int
    items: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLookup:
    model: str
    is_hit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFault:
    """The cache could not read or write; serving goes on without it."""

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSwapped:
    """A model's engine changed. Empty versions: nothing before (first load) or after (unload)."""

    model: str
    old_version: str
    new_version: str
