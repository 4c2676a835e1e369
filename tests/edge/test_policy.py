import math

import numpy as np
import pytest

from common.request import Context, Priority, Privacy, Reason, Request, Response
from common.serving.target import Estimate, Readiness, Target
from edge.policy import EdgeFirst


class Stub:
    """A target of which only what a policy may read is there."""

    def __init__(self, name: str, readiness: Readiness = Readiness.READY, estimate: Estimate | None = None) -> None:
        self.name, self._readiness, self._estimate = name, readiness, estimate or Estimate()

    async def infer(self, request: Request) -> Response:
        raise AssertionError("a policy never calls a target")

    def readiness(self, model: str, version: str | None = None) -> Readiness:
        return self._readiness

    def estimate(self, request: Request) -> Estimate:
        return self._estimate


CLOUD = Stub("cloud")


def plan(edge: Stub, cloud: Stub | None = CLOUD, **context: object) -> list[tuple[str, Reason | None]]:
    request = Request(
        model="m",
        inputs={"x": np.zeros((1, 2), np.float32)},
        context=Context(**context),  # type: ignore[arg-type]
    )
    targets: dict[str, Target] = {"edge": edge}
    if cloud is not None:
        targets["cloud"] = cloud
    return [(step.target.name, step.reason) for step in EdgeFirst().rank(request, targets, now=100.0).steps]


def test_a_free_edge_answers_and_the_cloud_stands_behind_it() -> None:
    assert plan(Stub("edge", estimate=Estimate(seconds=0.01))) == [("edge", None), ("cloud", None)]


@pytest.mark.parametrize(
    ("edge", "expected"),
    [
        (Stub("edge", Readiness.ABSENT), [("cloud", Reason.NO_ENGINE)]),
        (Stub("edge", Readiness.BUILDING), [("cloud", Reason.BUILDING)]),
        (Stub("edge", estimate=Estimate(outside_profile="9 rows")), [("cloud", Reason.OUTSIDE_PROFILE)]),
        (
            Stub("edge", estimate=Estimate(queued_rows=9, queue_limit=8)),
            [("cloud", Reason.OVERLOAD), ("edge", None)],
        ),
        (Stub("edge", estimate=Estimate(seconds=0.6)), [("cloud", Reason.DEADLINE), ("edge", None)]),
    ],
)
def test_every_reason_to_leave(edge: Stub, expected: list[tuple[str, Reason | None]]) -> None:
    assert plan(edge) == expected


def test_the_callers_deadline_counts_where_it_is_tighter_than_the_class() -> None:
    edge = Stub("edge", estimate=Estimate(seconds=0.06))
    assert plan(edge, deadline=100.05)[0] == ("cloud", Reason.DEADLINE)
    assert plan(edge, deadline=100.07)[0] == ("edge", None)
    assert plan(edge, deadline=math.inf)[0] == ("edge", None)


@pytest.mark.parametrize(
    ("seconds", "deadline", "reserve"),
    [
        (0.6, 102.0, 0.72),  # a fifth more than estimated: the cloud has 1.28 s, and the edge its time if it is silent
        (0.9, 102.0, 0.0),  # would leave the cloud less than half
        (0.6, math.inf, 0.0),
    ],
)
def test_a_slow_edge_keeps_its_time_while_the_cloud_is_asked(seconds: float, deadline: float, reserve: float) -> None:
    request = Request(model="m", inputs={"x": np.zeros((1, 2), np.float32)}, context=Context(deadline=deadline))
    targets: dict[str, Target] = {"edge": Stub("edge", estimate=Estimate(seconds=seconds)), "cloud": CLOUD}
    first, second = EdgeFirst().rank(request, targets, now=100.0).steps
    assert (first.target.name, second.target.name) == ("cloud", "edge")
    assert (first.reserve_s, second.reserve_s) == (pytest.approx(reserve), 0.0)


def test_offline_work_has_no_latency_target() -> None:
    edge = Stub("edge", estimate=Estimate(seconds=30.0))
    assert plan(edge, priority=Priority.OFFLINE)[0] == ("edge", None)
    assert plan(edge, priority=Priority.BATCH)[0] == ("cloud", Reason.DEADLINE)


@pytest.mark.parametrize("readiness", list(Readiness))
def test_device_only_never_leaves(readiness: Readiness) -> None:
    edge = Stub("edge", readiness, Estimate(seconds=99.0, outside_profile="9 rows"))
    assert plan(edge, privacy=Privacy.DEVICE_ONLY) == [("edge", None)]


def test_a_node_without_a_cloud_answers_itself() -> None:
    assert plan(Stub("edge", Readiness.ABSENT), cloud=None) == [("edge", None)]
