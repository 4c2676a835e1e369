"""What the request path reports: frozen events handed to a hook. Logic emits them; metrics and logs are hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from common.request import Priority, Reason

_log = logging.getLogger(__name__)

E = TypeVar("E")
Hook = Callable[[Any], None]


def ignore(_event: Any) -> None:
    """The hook of who does not listen."""


class KindHook:
    """A hook with one function for each kind of event that it knows; the others are ignored."""

    def __init__(self) -> None:
        self._on: dict[type, Callable[[Any], None]] = {}

    def __call__(self, event: object) -> None:
        if (fn := self._on.get(type(event))) is not None:
            fn(event)

    def register(self, kind: type[E], fn: Callable[[E], None]) -> None:
        """Before the first event of its kind: from then on it is settled who listens."""
        if kind in self._on:
            raise ValueError(f"events of kind {kind.__name__} have their function already")
        self._on[kind] = fn

    def listener(self, kind: type) -> Hook:
        return self._on.get(kind, ignore)


def fan_out(*hooks: Hook) -> Hook:
    """One hook for several. A hook's failure is logged: it is neither the emitter's nor the other hooks'."""
    listeners: dict[type, list[Hook]] = {}

    def listening(kind: type) -> list[Hook]:
        found = [hook.listener(kind) if isinstance(hook, KindHook) else hook for hook in hooks]
        return [fn for fn in found if fn is not ignore]

    def emit(event: object) -> None:
        kind = type(event)
        if (fns := listeners.get(kind)) is None:
            fns = listeners[kind] = listening(kind)
        for fn in fns:
            try:
                fn(event)
            except Exception:
                _log.exception("an event hook failed on %s", kind.__name__)

    return emit


class RequestDone(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One call through the data plane ended. `error` is the error's class name, empty for an answer."""

    request_id: str
    model: str
    version: str
    target: str
    reason: Reason | None
    priority: Priority
    seconds: float
    error: str = ""


class TargetFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A target did not answer; the router goes on to the next step of its plan, if there is one."""

    request_id: str
    model: str
    target: str
    error: str


class BatchDone(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    model: str
    rows: int
    items: int
    seconds: float


class EngineHung(msgspec.Struct, frozen=True, kw_only=True):
    """An engine did not come back from a batch, and was given up."""

    model: str
    version: str


class CacheLookup(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    is_hit: bool


class CacheFault(msgspec.Struct, frozen=True, kw_only=True):
    """The cache could not read or write, or refused a row; serving goes on without it."""

    problem: str
    is_new: bool = True  # False while the same goes on: counted, but not worth a line


class EngineSwapped(msgspec.Struct, frozen=True, kw_only=True):
    """A model's engine changed. Empty versions: nothing before (first load) or after (unload)."""

    model: str
    old_version: str
    new_version: str
