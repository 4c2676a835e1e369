"""Which worker answers: the rules of the pool, without I/O.

Owns what is known of the members (health, models, calls in flight, recent failures, pauses that they asked for) and the
choice: power of two choices over the healthy members that serve the model. Leaves connections and probes to
`members.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.errors import ModelNotFound, ModelNotReady, Unavailable, VersionNotFound
from common.request import Priority
from common.serving.breaker import Pauses, pause_s
from common.serving.catalog import ModelState, ModelStatus

MAX_MISSED = 3  # probes without an answer in time before a member counts as unhealthy: a busy machine is late at times
COOL_OFF_S = 2.0  # how long a member that broke a call is avoided; it has nothing in flight and would look best


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One worker as the pool sees it. Unhealthy until a probe has said otherwise."""

    address: str
    is_healthy: bool = False
    index: tuple[ModelStatus, ...] = ()
    in_flight: int = 0
    missed: int = 0  # probes in a row
    cool_until: float = float("-inf")  # monotonic
    pauses: dict[str, Pauses] = field(default_factory=dict)  # by model: "come back in a second", said the member

    def paused_until(self, model: str, priority: Priority) -> float:
        pauses = self.pauses.get(model)
        return float("-inf") if pauses is None else pauses.until(priority)

    def serves(self, model: str, version: str | None) -> bool:
        return any(s.name == model and s.state is ModelState.READY and version in (None, s.version) for s in self.index)


@dataclass(slots=True)
class Pool:
    members: tuple[Member, ...]
    rng: random.Random = field(default_factory=random.Random)

    @property
    def healthy(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.is_healthy)

    def pick(
        self,
        model: str,
        version: str | None,
        now: float,
        *,
        priority: Priority = Priority.INTERACTIVE,
        avoid: Iterable[Member] = (),
    ) -> Member:
        """A healthy member that serves the model (in this version, where one is named), cool ones first, never one that
        has asked for a pause.

        Raises `Unavailable` when no member is healthy or all want a pause, `ModelNotFound`, `VersionNotFound` or
        `ModelNotReady` for what the healthy ones do not serve.
        """
        avoided = set(avoid)
        serving = [m for m in self.healthy if m not in avoided and m.serves(model, version)]
        if not serving:
            raise self._nobody(model, version)
        open_ = [m for m in serving if m.paused_until(model, priority) <= now]
        if not open_:
            back = min(m.paused_until(model, priority) for m in serving)
            raise Unavailable(f"every worker of model {model!r} asked for a pause", retry_after_s=back - now)
        cool = [m for m in open_ if m.cool_until <= now] or open_
        return min(self.rng.sample(cool, min(2, len(cool))), key=lambda member: member.in_flight)

    def observed(self, member: Member, *, is_ready: bool, index: Iterable[ModelStatus] = ()) -> bool:
        """What a probe saw. True when the member's health changed."""
        changed = member.is_healthy != is_ready
        member.is_healthy, member.missed = is_ready, 0
        member.index = tuple(index)
        return changed

    def missed(self, member: Member) -> bool:
        """A probe had no answer in time. True when the member's health changed."""
        member.missed += 1
        return member.missed >= MAX_MISSED and self.observed(member, is_ready=False)

    def broke(self, member: Member, now: float) -> None:
        """A call to the member ended without an answer. Of two cool-offs the longer stands."""
        member.cool_until = max(member.cool_until, now + COOL_OFF_S)

    def refused(self, member: Member, model: str, priority: Priority, exc: Unavailable, now: float) -> None:
        """The member has no room (or no engine) now, and said when to come back."""
        member.pauses.setdefault(model, Pauses()).ask(now + pause_s(exc), priority)

    def index(self) -> list[ModelStatus]:
        """Every (model, version) that a healthy member knows, in the best state that any has it in."""
        best: dict[tuple[str, str], ModelStatus] = {}
        for member in self.healthy:
            for status in member.index:
                key = (status.name, status.version)
                if key not in best or _rank(status) < _rank(best[key]):
                    best[key] = status
        return [best[key] for key in sorted(best)]

    def _nobody(self, model: str, version: str | None) -> Exception:
        if not self.healthy:
            return Unavailable("no worker of the cloud pool is healthy")
        known = self.index()
        of_model = [status for status in known if status.name == model]
        if not of_model:
            return ModelNotFound(model, {status.name for status in known})
        ready = {status.version for status in of_model if status.state is ModelState.READY}
        if version is not None and ready and version not in ready:
            return VersionNotFound(model, version, ready)
        if ready:
            return Unavailable(f"no other worker serves model {model!r}")
        state = min(of_model, key=_rank)
        return ModelNotReady(model, state.reason or state.state.value.lower())


def _rank(status: ModelStatus) -> int:
    return tuple(ModelState).index(status.state)
