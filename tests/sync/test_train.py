from __future__ import annotations

from typing import Any

import pytest

from sync.fleet import ModelReport, NodeReport
from sync.watch.train import Offer, waits_for

OFFER = Offer(model="digits", version="5", epoch=5, since=1000.0)
DEADLINE_S = 3600.0


def node(name: str = "a", *, at: float = 1010.0, problem: str = "", **fields: Any) -> NodeReport:
    given = {"state": "COMMITTED", "code": "SERVES", "reason": "", "version": "5", "active": "5", "epoch": 5} | fields
    return NodeReport(node=name, at=at, problem=problem, models=(ModelReport(model="digits", **given),))


def said(*fleet: NodeReport, now: float = 2000.0) -> str | None:
    return waits_for(OFFER, fleet, now, DEADLINE_S)


@pytest.mark.parametrize(
    "last",
    [
        node(),
        node(epoch=6, version="6"),  # told of something newer already
        node(state="QUARANTINED", code="GATE_FAILED", active="4"),
        node(state="CLOUD_ONLY", code="ERRORS", active=""),
        node(state="COMMITTED", code="NO_VARIANT", version="4", active="4"),
        NodeReport(node="a", at=1010.0, problem="", models=()),  # keeps other models
    ],
)
def test_a_node_at_its_end_is_not_waited_for(last: NodeReport) -> None:
    assert said(last) is None


@pytest.mark.parametrize(
    "last",
    [
        *(node(state=state, code="NEW") for state in ("ADMITTED", "FETCHING", "STAGED", "BUILDING", "GATED")),
        node(state="PROBATION", code="NEW"),
        node(state="ROLLING_BACK", code="ERRORS", active="4"),
        node(state="WAITING", code="WINDOW", active="4"),  # deferral is no failure
        node(epoch=4, version="4", active="4"),  # it polled, and has not heard of it
        NodeReport(node="a", at=1010.0, problem="no answer", models=()),
    ],
)
def test_a_node_on_the_way_is_waited_for_by_name(last: NodeReport) -> None:
    assert said(last, node("b")) == "digits/5 is on its way to 1 of 2 nodes (a)"


def test_who_made_no_contact_since_the_offer_does_not_count() -> None:
    silent = node("silent", at=999.0, epoch=4)
    assert said(node(), silent) is None
    assert said(silent) == "no node has made contact since digits/5 was released; 43 min until it counts as ended"


def test_the_deadline_ends_every_rollout() -> None:
    stuck = node(state="FETCHING", code="NETWORK")
    assert said(stuck, now=1000.0 + DEADLINE_S - 1) is not None
    assert said(stuck, now=1000.0 + DEADLINE_S) is None
    assert said(now=1000.0 + DEADLINE_S) is None
