"""Edge first: the device answers unless it cannot, or cannot in time; then the cloud, and the reason says why.

Pure: reads the targets' readiness and estimates, never touches them. DEVICE_ONLY never leaves, whatever happens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from common.request import SLA_S, Privacy, Reason, Request
from common.serving.policy import Plan, Step
from common.serving.target import Readiness, Target

EDGE, CLOUD = "edge", "cloud"

# The edge can still try where it would only be slow; these leave it nothing to try with.
_EDGE_CANNOT = (Reason.NO_ENGINE, Reason.BUILDING, Reason.OUTSIDE_PROFILE)
_MARGIN = 1.2  # an estimate is one


class EdgeFirst:
    def rank(self, request: Request, targets: Mapping[str, Target], now: float) -> Plan:
        edge, cloud = targets[EDGE], targets.get(CLOUD)
        home = Step(edge, stays=True)
        if cloud is None or request.context.privacy is Privacy.DEVICE_ONLY:
            return Plan((home,))
        reason = reason_to_leave(request, edge, now)
        if reason is None:
            return Plan((home, Step(cloud)))
        if reason in _EDGE_CANNOT:
            return Plan((Step(cloud, reason),))
        return Plan((Step(cloud, reason, reserve_s=_reserve_s(request, edge, now)), home))


def _reserve_s(request: Request, edge: Target, now: float) -> float:
    """What the edge needs to answer after a cloud that did not; 0 where that would leave the cloud too little."""
    remaining = request.context.deadline - now
    needed = _MARGIN * edge.estimate(request).seconds
    return needed if needed <= remaining / 2 and remaining != math.inf else 0.0


def reason_to_leave(request: Request, edge: Target, now: float) -> Reason | None:
    """Why the edge should not answer this, or None. The time allowed is the caller's deadline or its class's SLA."""
    readiness = edge.readiness(request.model, request.context.pin)
    if readiness is Readiness.ABSENT:
        return Reason.NO_ENGINE
    if readiness is Readiness.BUILDING:
        return Reason.BUILDING
    estimate = edge.estimate(request)
    if estimate.outside_profile:
        return Reason.OUTSIDE_PROFILE
    if estimate.is_full:
        return Reason.OVERLOAD
    if now + estimate.seconds > request.context.deadline:
        return Reason.DEADLINE
    if estimate.seconds > SLA_S[request.context.priority] and not estimate.is_stale:
        return Reason.DEADLINE  # a stale estimate is given a try: only an answer can correct it
    return None
