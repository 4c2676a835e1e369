"""Walks the policy's plan: tries each target once, passes over what its breaker holds back, stamps the answer.

Owns fallback: which errors are the caller's own (returned at once), which let the next target try, and what the caller
hears when no target answered. Leaves ranking to the policy, and work to the targets.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from common.clock import Clock, SystemClock
from common.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
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
        self._monotonic = (clock or SystemClock()).monotonic

    async def infer(self, request: Request) -> Response:
        """The first answer along the plan.

        The caller's own error is raised at once. When no target answered, the last one's error is raised, unless that
        one does not even know the model: then the error of the one that does.
        """
        now = self._monotonic()
        plan = self._policy.rank(request, self._targets, now)
        failed: OutriderError | None = None
        moved_on: Reason | None = None
        tried: tuple[str, ...] = ()
        for step in plan.steps:
            if step.target.name in tried:
                continue
            if failed is not None and not step.stays and not self._breakers.may_retry(failed):
                break  # the way home is no retry: it costs whoever failed nothing
            if not self._breakers.allows(step.target.name, request.model, request.context.priority, now):
                moved_on = Reason.BREAKER_OPEN
                continue
            try:
                asked = _with_less_time(request, step.reserve_s) if step.reserve_s else request
                return await self._try(step.target, asked, None if step.stays else step.reason or moved_on)
            except OutriderError as exc:
                tried += (step.target.name,)
                moved_on = _reason_to_go_on(exc)
                if moved_on is None and not isinstance(exc, NotFound):
                    raise
                if not isinstance(exc, NotFound | InvalidRequest):  # an answer, if one that the caller does not like
                    self._report(request, step.target, exc)
                failed = exc if failed is None or not isinstance(exc, NotFound) else failed
        raise failed or self._all_open(request, plan)

    async def _try(self, target: Target, request: Request, reason: Reason | None) -> Response:
        if reason is not request.context.reason:
            request = structs.replace(request, context=structs.replace(request.context, reason=reason))
        started = self._monotonic()
        try:
            response = await target.infer(request)
        except BaseException as exc:
            had_s = request.context.deadline - started
            priority = request.context.priority
            self._breakers.failed(target.name, request.model, priority, exc, had_s, self._monotonic())
            raise
        self._breakers.answered(target.name, request.model)
        stamp = response.stamp
        if stamp.reason is reason and stamp.target == target.name:
            return response
        return structs.replace(response, stamp=structs.replace(stamp, target=target.name, reason=reason))

    def _all_open(self, request: Request, plan: Plan) -> Unavailable:
        names = [step.target.name for step in plan.steps]
        opens_at = min(self._breakers.opens_at(name, request.model, request.context.priority) for name in names)
        return Unavailable(
            f"model {request.model!r}: {' and '.join(names)} failed lately and are left alone",
            retry_after_s=max(0.0, opens_at - self._monotonic()),
        )

    def _report(self, request: Request, target: Target, exc: OutriderError) -> None:
        self._on_event(
            TargetFailed(request_id=request.context.id, model=request.model, target=target.name, error=str(exc))
        )


def _with_less_time(request: Request, reserve_s: float) -> Request:
    """What a target is asked when the one behind it still needs `reserve_s` of the caller's time."""
    context = request.context
    return structs.replace(request, context=structs.replace(context, deadline=context.deadline - reserve_s))


def _reason_to_go_on(exc: OutriderError | None) -> Reason | None:
    for kind, reason in _FALLS_BACK:
        if isinstance(exc, kind):
            return reason
    return None
