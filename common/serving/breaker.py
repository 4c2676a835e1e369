"""When a target that keeps failing is left alone, and how often a failed call may be tried elsewhere. Pure rules.

A breaker stands for one target and one model. It opens after `FAILURES` in a row, lets one probe through when its
cooldown is over, and closes when that succeeds. A running cooldown is never shortened. A pause that a target asks for
holds for the class of service that it refused and for those below. The retry budget is gRPC A6's: tokens, one less for
a failure, a tenth more for a success, no retry at or below half.
"""

from __future__ import annotations

import math
from typing import Protocol

from common.errors import DeadlineExceeded, EngineError, OutriderError, TargetUnreachable, Unavailable
from common.request import Priority

FAILURES = 5
FIRST_COOLDOWN_S = 0.5
LONGEST_COOLDOWN_S = 5.0
FAIR_S = 0.5  # a deadline that left the target less than this says nothing about the target

LONGEST_PAUSE_S = 60.0  # that a target may ask for: one word of it must not be the end

TOKENS = 10.0
PER_SUCCESS = 0.1


class Pauses:
    """What a target asked for ("come back in a second"), by the class of the call that it refused.

    Its queue may be full of work that a more urgent class goes before: that one may still ask.
    """

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until: dict[Priority, float] = {}

    def ask(self, until: float, priority: Priority) -> None:
        """No call of this class before `until`; what is longer already stands."""
        self._until[priority] = max(self._until.get(priority, -math.inf), until)

    def until(self, priority: Priority) -> float:
        return max((until for other, until in self._until.items() if other <= priority), default=-math.inf)


def pause_s(exc: Unavailable) -> float:
    """How long a target that refused with `exc` is left alone."""
    return min(max(exc.retry_after_s, 0.0), LONGEST_PAUSE_S)


class Breaker:
    def __init__(self) -> None:
        self._failures = 0
        self._openings = 0
        self._cooling_until = -math.inf
        self._pauses = Pauses()
        self._is_probing = False

    def open_until(self, priority: Priority) -> float:
        return max(self._cooling_until, self._pauses.until(priority))

    def allows(self, now: float, priority: Priority) -> bool:
        """Whether a call may go to the target. Of a breaker whose cooldown is over, one at a time: the probe, which
        whoever was allowed must make."""
        if now < self.open_until(priority):
            return False
        if self._openings == 0:
            return True
        if self._is_probing:
            return False
        self._is_probing = True
        return True

    def succeeded(self) -> None:
        """Closes the breaker. A cooldown that the target asked for stands."""
        self._failures = self._openings = 0
        self._is_probing = False

    def failed(self, now: float) -> None:
        was_probe, self._is_probing = self._is_probing, False
        self._failures += 1
        if now < self._cooling_until:  # calls that were under way when it opened
            return
        if was_probe or self._failures >= FAILURES:
            cooldown = min(LONGEST_COOLDOWN_S, FIRST_COOLDOWN_S * 2.0**self._openings)
            self._openings += 1
            self._cooling_until = now + cooldown

    def said_nothing(self) -> None:
        """A call ended that tells nothing of the target: its caller's fault, or its caller left."""
        self._is_probing = False

    def rest(self, until: float, priority: Priority) -> None:
        """The target asks for a pause."""
        self._pauses.ask(until, priority)


class Breakers(Protocol):
    def allows(self, target: str, model: str, priority: Priority, now: float) -> bool:
        """Whether a call may go there now. One that may must go: it may be the probe."""
        ...

    def opens_at(self, target: str, model: str, priority: Priority) -> float:
        """When a call may go there again."""
        ...

    def answered(self, target: str, model: str) -> None: ...

    def failed(self, target: str, model: str, priority: Priority, exc: BaseException, had_s: float, now: float) -> None:
        """`had_s`: how long the target had before the caller's deadline."""
        ...

    def may_retry(self, exc: OutriderError) -> bool:
        """Whether a call that failed with `exc` may be tried elsewhere."""
        ...


class NoBreakers:
    """Of a process with one target: there is nowhere else to go."""

    def allows(self, target: str, model: str, priority: Priority, now: float) -> bool:
        return True

    def opens_at(self, target: str, model: str, priority: Priority) -> float:
        return -math.inf

    def answered(self, target: str, model: str) -> None: ...

    def failed(
        self, target: str, model: str, priority: Priority, exc: BaseException, had_s: float, now: float
    ) -> None: ...

    def may_retry(self, exc: OutriderError) -> bool:
        return True


class TargetBreakers:
    """A breaker for each target and model that has failed, and the router's retry budget."""

    MAX = 1024  # breakers; more (of models that strangers made up) are not remembered

    def __init__(self) -> None:
        self._breakers: dict[tuple[str, str], Breaker] = {}
        self._tokens = TOKENS

    def allows(self, target: str, model: str, priority: Priority, now: float) -> bool:
        breaker = self._breakers.get((target, model))
        return breaker is None or breaker.allows(now, priority)

    def opens_at(self, target: str, model: str, priority: Priority) -> float:
        breaker = self._breakers.get((target, model))
        return -math.inf if breaker is None else breaker.open_until(priority)

    def answered(self, target: str, model: str) -> None:
        if self._tokens < TOKENS:
            self._tokens = min(TOKENS, self._tokens + PER_SUCCESS)
        if (breaker := self._breakers.get((target, model))) is not None:
            breaker.succeeded()

    def failed(self, target: str, model: str, priority: Priority, exc: BaseException, had_s: float, now: float) -> None:
        if isinstance(exc, EngineError | TargetUnreachable) or (isinstance(exc, DeadlineExceeded) and had_s >= FAIR_S):
            self._tokens = max(0.0, self._tokens - 1)
            self._breaker(target, model).failed(now)
        elif type(exc) is Unavailable:  # the target itself asked for a pause
            self._breaker(target, model).rest(now + pause_s(exc), priority)
            self._breaker(target, model).said_nothing()
        elif (breaker := self._breakers.get((target, model))) is not None:
            if isinstance(exc, OutriderError) and not isinstance(exc, DeadlineExceeded | Unavailable):
                breaker.succeeded()  # it answered, if only that the caller is wrong
            else:
                breaker.said_nothing()

    def may_retry(self, exc: OutriderError) -> bool:
        """Work that was refused before it began (a full queue, no engine) costs nothing and may always go on."""
        return self._tokens > TOKENS / 2 or not isinstance(exc, EngineError | TargetUnreachable)

    def _breaker(self, target: str, model: str) -> Breaker:
        if (target, model) not in self._breakers and len(self._breakers) >= self.MAX:
            self._breakers.pop(next(iter(self._breakers)))
        return self._breakers.setdefault((target, model), Breaker())
