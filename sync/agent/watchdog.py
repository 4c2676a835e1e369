"""A bound on what somebody else's code may take: a builder that hangs must not hold up every later release."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from common.errors import BuildTimedOut

T = TypeVar("T")


def within(seconds: float, what: str, call: Callable[[], T], late: Callable[[T], object]) -> T:
    """What `call` returns or raises, from a thread of its own. Raises `BuildTimedOut` after `seconds`.

    The thread cannot be ended: it goes on, and what it comes to after all is handed to `late` there.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []
    guard, done, is_given_up = threading.Lock(), threading.Event(), False

    def work() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except BaseException as exc:
            error = exc
        with guard:
            outcome.append((result, error))
            is_late = is_given_up
        done.set()
        if is_late and error is None:
            late(result)  # type: ignore[arg-type]  # returned, so it is a T

    threading.Thread(target=work, name="sync-build", daemon=True).start()
    done.wait(seconds)
    with guard:
        is_given_up = not outcome
    if is_given_up:
        raise BuildTimedOut(what, seconds)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
