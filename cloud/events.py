"""What the pool reports, and the metrics and log lines that come of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from common.telemetry.logs import EventLog, log
from common.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged:
    member: str
    is_healthy: bool
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redispatched:
    """A member gave no answer to a call, which goes to another one."""

    model: str
    member: str
    problem: str


def measure_pool(metrics: Metrics) -> None:
    healthy = metrics.gauge("outrider_pool_member_healthy", "1 while a worker is healthy.", ("member",))
    redispatched = metrics.counter("outrider_pool_redispatches_total", "Calls sent to a second worker.", ("member",))
    metrics.register(HealthChanged, lambda event: healthy(float(event.is_healthy), event.member))
    metrics.register(Redispatched, lambda event: redispatched(1, event.member))


def log_pool(events: EventLog) -> None:
    def health_changed(event: HealthChanged) -> None:
        if event.is_healthy:
            log("worker is healthy", member=event.member)
        else:
            log("worker is not healthy", logging.WARNING, member=event.member, problem=event.problem)

    def redispatched(event: Redispatched) -> None:
        events.limited(
            "call goes to another worker",
            logging.WARNING,
            key=(event.member,),
            model=event.model,
            member=event.member,
            problem=event.problem,
        )

    events.register(HealthChanged, health_changed)
    events.register(Redispatched, redispatched)
