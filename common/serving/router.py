"""Walks the policy's plan: tries each target once, says why it went on, stamps the answer.

Owns fallback: which errors are the caller's own (returned at once), which let the next target try, and what the caller
hears when no target answered. Leaves ranking to the policy, and work to the targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from common.clock import Clock, SystemClock
from common.errors import (
    DeadlineExceeded,
    EngineError,
    ModelNotReady,
    NotFound,
    OutriderError,
    OutsideProfile,
    Overloaded,
    Unavailable,
)
from common.request import Reason, Request, Response
from common.serving.policy import Policy
from common.serving.target import Target
from common.telemetry.events import Hook, TargetFailed, ignore

# What a target's failure means to the next target in the plan; every other error is the caller's own and final.
_FALLS_BACK: tuple[tuple[type[OutriderError], Reason], ...] = (
    (EngineError, Reason.ENGINE_ERROR),
    (Overloaded, Reason.OVERLOAD),
    (DeadlineExceeded, Reason.DEADLINE),
    (OutsideProfile, Reason.OUTSIDE_PROFILE),
    (ModelNotReady, Reason.NO_ENGINE),
    (Unavailable, Reason.NO_ENGINE),
)


class Router:
    def __init__(
        self, targets: Iterable[Target], policy: Policy, *, on_event: Hook = ignore, clock: Clock | None = None
    ) -> None:
        self._targets = {target.name: target for target in targets}
        self._policy = policy
        self._on_event = on_event
        self._clock = clock or SystemClock()

    async def infer(self, request: Request) -> Response:
        """The first answer along the plan.

        The caller's own error is raised at once. When no target answered, the last one's error is raised, unless that
        one does not even know the model: then the error of the one that does.
        """
        plan = self._policy.rank(request, self._targets, self._clock.monotonic())
        failed: OutriderError | None = None
        for step in plan.steps:
            reason = None if step.stays else step.reason or _reason_to_go_on(failed)
            try:
                return await self._try(step.target, request, reason)
            except OutriderError as exc:
                if _reason_to_go_on(exc) is None and not isinstance(exc, NotFound):
                    raise
                self._report(request, step.target, exc)
                failed = exc if failed is None or not isinstance(exc, NotFound) else failed
        assert failed is not None, "a plan has at least one step"
        raise failed

    async def _try(self, target: Target, request: Request, reason: Reason | None) -> Response:
        if reason is not request.context.reason:
            request = dataclasses.replace(request, context=dataclasses.replace(request.context, reason=reason))
        response = await target.infer(request)
        return dataclasses.replace(
            response, stamp=dataclasses.replace(response.stamp, target=target.name, reason=reason)
        )

    def _report(self, request: Request, target: Target, exc: OutriderError) -> None:
        self._on_event(
            TargetFailed(request_id=request.context.id, model=request.model, target=target.name, error=str(exc))
        )


def _reason_to_go_on(exc: OutriderError | None) -> Reason | None:
    for kind, reason in _FALLS_BACK:
        if isinstance(exc, kind):
            return reason
    return None
