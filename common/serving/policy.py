"""The seam between the router and who decides: a policy is pure, ranks targets and says why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from common.request import Reason, Request
from common.serving.target import Target


class Step(msgspec.Struct, frozen=True):
    """One target to try. `reason` says why the request leaves the edge: known at once, or what failed before it.

    A step that `stays` is the edge itself: its answer has left nothing and carries no reason. `reserve_s` of the
    caller's time are not this target's: should it stay silent, the next one can still answer.
    """

    target: Target
    reason: Reason | None = None
    stays: bool = False
    reserve_s: float = 0.0


class Plan(msgspec.Struct, frozen=True):
    """Targets in order. Empty plans are not made: a policy raises the error that tells the caller why."""

    steps: tuple[Step, ...]


class Policy(Protocol):
    def rank(self, request: Request, targets: Mapping[str, Target], now: float) -> Plan: ...


class Only:
    """The policy of a process with one target: a worker (its device) or a gateway (its pool)."""

    def __init__(self, target: str) -> None:
        self._target = target

    def rank(self, request: Request, targets: Mapping[str, Target], now: float) -> Plan:
        return Plan((Step(targets[self._target], request.context.reason),))
