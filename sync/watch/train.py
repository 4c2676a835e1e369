"""When the next candidate may go: a rollout in progress runs to its end, and only then the newest is released.

A rule over what nodes report, without I/O. It counts the nodes that made contact since the offer: what is not heard
of holds nobody up for longer than the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sync.agent.states import Code, State
from sync.fleet import ModelReport, NodeReport

_ENDED: Final = frozenset({State.COMMITTED, State.QUARANTINED, State.CLOUD_ONLY})


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What is desired of a model, and since when (seconds since 1970)."""

    model: str
    version: str
    epoch: int
    since: float


class Rollouts(Protocol):
    """Who knows how far a rollout is."""

    def in_progress(self, model: str) -> str | None:
        """What is still waited for; None once the next candidate may go."""
        ...


def waits_for(offer: Offer, fleet: Sequence[NodeReport], now: float, deadline_s: float) -> str | None:
    """What a rollout still waits for; None when it is at its end."""
    left_s = offer.since + deadline_s - now
    if left_s <= 0:
        return None
    heard = [node for node in fleet if node.at >= offer.since]
    what = f"{offer.model}/{offer.version}"
    if not heard:
        return f"no node has made contact since {what} was released; {_minutes(left_s)} until it counts as ended"
    underway = [node.node for node in heard if not _has_ended(offer, node)]
    if not underway:
        return None
    some = ", ".join(underway[:3]) + (", ..." if len(underway) > 3 else "")
    return f"{what} is on its way to {len(underway)} of {len(heard)} nodes ({some})"


def _has_ended(offer: Offer, node: NodeReport) -> bool:
    """A node that was never told of the model has no part in it."""
    reports = [one for one in node.models if one.model == offer.model]
    return all(_is_end(offer, one) for one in reports) and (bool(reports) or not node.problem)


def _is_end(offer: Offer, report: ModelReport) -> bool:
    return report.epoch >= offer.epoch and (report.state in _ENDED or report.code == Code.NO_VARIANT)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"
