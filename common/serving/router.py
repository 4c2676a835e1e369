"""Walks the policy's plan: tries each target once, passes over what its breaker holds back, stamps the answer.

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
from common.serving.breaker import Breakers, NoBreakers
from common.serving.policy import Plan, Policy
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
        self,
        targets: Iterable[Target],
        policy: Policy,
        *,
        breakers: Breakers | None = None,
        on_event: Hook = ignore,
        clock: Clock | None = None,
    ) -> None:
        self._targets = {target.name: target for target in targets}
        self._policy = policy
        self._breakers = breakers or NoBreakers()
        self._on_event = on_event
        self._clock = clock or SystemClock()

    async def infer(self, request: Request) -> Response:
        """The first answer along the plan.

        The caller's own error is raised at once. When no target answered, the last one's error is raised, unless that
        one does not even know the model: then the error of the one that does.
        """
        now = self._clock.monotonic()
        plan = self._policy.rank(request, self._targets, now)
        failed: OutriderError | None = None
        moved_on: Reason | None = None
        for step in plan.steps:
            if not self._breakers.allows(step.target.name, request.model, now):
                moved_on = Reason.BREAKER_OPEN
                continue
            if failed is not None and not self._breakers.may_retry(failed):
                break
            try:
                return await self._try(step.target, request, None if step.stays else step.reason or moved_on)
            except OutriderError as exc:
                moved_on = _reason_to_go_on(exc)
                if moved_on is None and not isinstance(exc, NotFound):
                    raise
                self._report(request, step.target, exc)
                failed = exc if failed is None or not isinstance(exc, NotFound) else failed
        raise failed or self._all_open(request, plan)

    async def _try(self, target: Target, request: Request, reason: Reason | None) -> Response:
        if reason is not request.context.reason:
            request = dataclasses.replace(request, context=dataclasses.replace(request.context, reason=reason))
        had_s = request.context.deadline - self._clock.monotonic()
        try:
            response = await target.infer(request)
        except BaseException as exc:
            self._breakers.failed(target.name, request.model, exc, had_s, self._clock.monotonic())
            raise
        self._breakers.answered(target.name, request.model)
        return dataclasses.replace(
            response, stamp=dataclasses.replace(response.stamp, target=target.name, reason=reason)
        )

    def _all_open(self, request: Request, plan: Plan) -> Unavailable:
        names = [step.target.name for step in plan.steps]
        opens_at = min(self._breakers.opens_at(name, request.model) for name in names)
        return Unavailable(
            f"model {request.model!r}: {' and '.join(names)} failed lately and are left alone",
            retry_after_s=max(0.0, opens_at - self._clock.monotonic()),
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
