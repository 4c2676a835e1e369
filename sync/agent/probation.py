"""The rules of probation, without I/O: whether a version that has begun to serve stays.

What is compared is the engine's own doing, not the queue before it: failed calls, and the latency model of the engine
beside that of the one before. Bounds are wide, since a version that is rolled back is refused for good.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.serving.vitals import Vitals
from sync.agent.states import Code

MAX_STARTS = 2  # of the process during one probation: a crash may have another cause, three have not


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbationLimits:
    """How long a version is watched, and what it may do meanwhile. `seconds` 0: it stays at once."""

    seconds: float = 60.0
    min_errors: int = 3  # fewer say nothing
    max_error_share: float = 0.05  # of its calls, beyond the share of the version before
    latency_factor: float = 5.0  # times the latency of the version before, once there are `min_calls`; 0: any
    min_calls: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    code: Code
    reason: str


def judge(now: Vitals, before: Vitals | None, limits: ProbationLimits) -> Failed | None:
    """None while there is nothing against it. `before`: of the version that served, as it was when it was replaced."""
    usual = before.errors / before.calls if before is not None and before.calls else 0.0
    share = now.errors / now.calls if now.calls else 0.0
    if now.errors >= limits.min_errors and share > usual + limits.max_error_share:
        said = f"{now.errors} of {now.calls} calls failed in version {now.version}"
        return Failed(code=Code.ERRORS, reason=f"{said}, {100 * usual:.1f} % before it")
    if now.latency_s is None or before is None or before.latency_s is None or not limits.latency_factor:
        return None
    if now.calls >= limits.min_calls and now.latency_s > limits.latency_factor * before.latency_s:
        took = f"{1000 * now.latency_s:.2f} ms a row after {now.calls} calls, {1000 * before.latency_s:.2f} ms before"
        return Failed(code=Code.LATENCY, reason=f"version {now.version} takes {took}")
    return None
