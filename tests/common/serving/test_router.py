import asyncio
from collections.abc import Mapping

import numpy as np
import pytest
from msgspec import structs

from common.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidInput,
    ModelNotFound,
    ModelNotReady,
    OutriderError,
    OutsideProfile,
    Overloaded,
    TargetUnreachable,
    Unavailable,
)
from common.request import Context, Priority, Reason, Request, Response, Stamp
from common.serving.breaker import TargetBreakers
from common.serving.policy import Plan, Step
from common.serving.router import Router
from common.serving.target import Estimate, Readiness, Target
from common.telemetry.events import TargetFailed
from tests.fakes import FakeClock

REQUEST = Request(model="m", inputs={"x": np.zeros((1, 2), np.float32)})


class FakeTarget:
    def __init__(self, name: str, problem: OutriderError | None = None) -> None:
        self.name, self.problem = name, problem
        self.seen: list[Request] = []

    async def infer(self, request: Request) -> Response:
        self.seen.append(request)
        if self.problem is not None:
            raise self.problem
        return Response(outputs={}, stamp=Stamp(target="?", model=request.model, version="7", by=f"{self.name}-1"))

    def readiness(self, model: str, version: str | None = None) -> Readiness:
        return Readiness.READY

    def estimate(self, request: Request) -> Estimate:
        return Estimate()


class InOrder:
    def __init__(self, reason: Reason | None = None) -> None:
        self.reason = reason

    def rank(self, request: Request, targets: Mapping[str, Target], now: float) -> Plan:
        return Plan(tuple(Step(target, self.reason) for target in targets.values()))


async def test_the_first_target_that_answers_is_stamped() -> None:
    edge, cloud = FakeTarget("edge"), FakeTarget("cloud")
    response = await Router([edge, cloud], InOrder()).infer(REQUEST)
    assert response.stamp == Stamp(target="edge", model="m", version="7", by="edge-1", reason=None)
    assert cloud.seen == []


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (EngineError("m", "odd"), Reason.ENGINE_ERROR),
        (Overloaded("device", queued=9, limit=8), Reason.OVERLOAD),
        (DeadlineExceeded("m", "before"), Reason.DEADLINE),
        (OutsideProfile("m", "9 rows", "8"), Reason.OUTSIDE_PROFILE),
        (ModelNotReady("m", "unloaded"), Reason.NO_ENGINE),
    ],
)
async def test_what_the_edge_could_not_answer_goes_to_the_cloud_and_says_why(
    problem: OutriderError, reason: Reason
) -> None:
    events: list[object] = []
    edge, cloud = FakeTarget("edge", problem), FakeTarget("cloud")
    response = await Router([edge, cloud], InOrder(), on_event=events.append).infer(REQUEST)
    assert (response.stamp.target, response.stamp.reason) == ("cloud", reason)
    assert cloud.seen[0].context.reason is reason  # the next hop is told, too
    has_failed = not isinstance(problem, OutsideProfile)  # else it has answered: not here
    assert [type(event) for event in events] == [TargetFailed] * has_failed


async def test_the_callers_own_fault_is_never_tried_elsewhere() -> None:
    edge, cloud = FakeTarget("edge", InvalidInput("inputs", "odd")), FakeTarget("cloud")
    with pytest.raises(InvalidInput):
        await Router([edge, cloud], InOrder()).infer(REQUEST)
    assert cloud.seen == []


async def test_a_target_that_does_not_know_the_model_is_not_the_last_word() -> None:
    edge, cloud = FakeTarget("edge", EngineError("m", "odd")), FakeTarget("cloud", ModelNotFound("m"))
    with pytest.raises(EngineError):  # somebody does know it
        await Router([edge, cloud], InOrder()).infer(REQUEST)
    knows = FakeTarget("edge")
    assert (
        await Router([FakeTarget("cloud", ModelNotFound("m")), knows], InOrder()).infer(REQUEST)
    ).stamp.by == "edge-1"
    with pytest.raises(ModelNotFound):
        await Router([FakeTarget("cloud", ModelNotFound("m"))], InOrder()).infer(REQUEST)


async def test_an_answer_of_the_edge_after_the_cloud_failed_carries_no_reason() -> None:
    class CloudFirst:
        def rank(self, request: Request, targets: Mapping[str, Target], now: float) -> Plan:
            return Plan((Step(targets["cloud"], Reason.DEADLINE), Step(targets["edge"], stays=True)))

    edge, cloud = FakeTarget("edge"), FakeTarget("cloud", TargetUnreachable("cloud", "down"))
    response = await Router([edge, cloud], CloudFirst()).infer(REQUEST)
    assert (response.stamp.target, response.stamp.reason) == ("edge", None)


async def test_when_nobody_answers_the_caller_hears_the_last_target() -> None:
    edge, cloud = FakeTarget("edge", EngineError("m", "odd")), FakeTarget("cloud", TargetUnreachable("cloud", "down"))
    with pytest.raises(TargetUnreachable):
        await Router([edge, cloud], InOrder()).infer(REQUEST)
    assert (len(edge.seen), len(cloud.seen)) == (1, 1)


async def test_the_reason_of_the_plan_stands() -> None:
    cloud = FakeTarget("cloud")
    response = await Router([cloud], InOrder(Reason.NO_ENGINE)).infer(REQUEST)
    assert response.stamp.reason is Reason.NO_ENGINE


async def test_the_rest_of_the_context_travels_unchanged() -> None:
    cloud = FakeTarget("cloud")
    context = Context(id="abc", tenant="t", deadline=5.0, pin="7")
    await Router([cloud], InOrder(Reason.DEADLINE)).infer(structs.replace(REQUEST, context=context))
    assert cloud.seen[0].context == structs.replace(context, reason=Reason.DEADLINE)


async def test_after_five_failures_no_call_reaches_the_target_until_its_probe() -> None:
    clock = FakeClock()
    edge, cloud = FakeTarget("edge"), FakeTarget("cloud", TargetUnreachable("cloud", "down"))
    router = Router([cloud, edge], InOrder(Reason.NO_ENGINE), breakers=TargetBreakers(), clock=clock)
    for _ in range(20):
        await router.infer(REQUEST)
    assert len(cloud.seen) == 5
    clock.advance(0.6)
    cloud.problem = None
    assert (await router.infer(REQUEST)).stamp.target == "cloud"
    assert len(cloud.seen) == 6


async def test_a_target_that_is_left_alone_is_a_reason_of_its_own() -> None:
    edge, cloud = FakeTarget("edge", EngineError("m", "odd")), FakeTarget("cloud")
    router = Router([edge, cloud], InOrder(), breakers=TargetBreakers(), clock=FakeClock())
    reasons = [(await router.infer(REQUEST)).stamp.reason for _ in range(7)]
    assert reasons == [Reason.ENGINE_ERROR] * 5 + [Reason.BREAKER_OPEN] * 2
    assert len(edge.seen) == 5


async def test_with_every_breaker_open_the_caller_is_told_when_to_come_back() -> None:
    cloud = FakeTarget("cloud", TargetUnreachable("cloud", "down"))
    router = Router([cloud], InOrder(Reason.NO_ENGINE), breakers=TargetBreakers(), clock=FakeClock())
    for _ in range(5):
        with pytest.raises(TargetUnreachable):
            await router.infer(REQUEST)
    with pytest.raises(Unavailable, match="left alone") as caught:
        await router.infer(REQUEST)
    assert 0 < caught.value.retry_after_s <= 0.5
    assert len(cloud.seen) == 5


async def test_a_cancelled_probe_lets_the_next_one_through() -> None:
    clock = FakeClock()
    cloud = FakeTarget("cloud", TargetUnreachable("cloud", "down"))
    router = Router([cloud], InOrder(Reason.NO_ENGINE), breakers=TargetBreakers(), clock=clock)
    for _ in range(5):
        with pytest.raises(TargetUnreachable):
            await router.infer(REQUEST)
    clock.advance(1.0)

    async def never(request: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    cloud.infer = never  # type: ignore[method-assign]
    probe = asyncio.create_task(router.infer(REQUEST))
    await asyncio.sleep(0)
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    del cloud.infer  # type: ignore[method-assign]
    cloud.problem = None
    assert (await router.infer(REQUEST)).stamp.target == "cloud"


async def test_a_probe_that_the_retry_budget_forbids_is_not_taken_for_under_way() -> None:
    """The breaker lets one probe through: it must not be given to a call that then stays where it is."""
    clock = FakeClock()
    edge, cloud = FakeTarget("edge"), FakeTarget("cloud", TargetUnreachable("cloud", "down"))
    breakers = TargetBreakers()
    router = Router([edge, cloud], InOrder(), breakers=breakers, clock=clock)
    for _ in range(5):
        breakers.failed("cloud", "m", Priority.INTERACTIVE, TargetUnreachable("cloud", "down"), 5.0, clock.monotonic())
    clock.advance(1.0)  # the cloud's cooldown is over, the retry budget is still used up
    edge.problem = EngineError("m", "odd")
    with pytest.raises(EngineError):
        await router.infer(REQUEST)
    assert cloud.seen == []
    edge.problem, cloud.problem = Unavailable("closing"), None
    assert (await router.infer(REQUEST)).stamp.target == "cloud"


async def test_a_plan_that_names_a_target_twice_tries_it_once() -> None:
    class Again:
        def rank(self, request: Request, targets: Mapping[str, Target], now: float) -> Plan:
            return Plan(tuple(Step(target) for target in (*targets.values(), *targets.values())))

    edge, cloud = FakeTarget("edge", EngineError("m", "odd")), FakeTarget("cloud", EngineError("m", "odd"))
    with pytest.raises(EngineError):
        await Router([edge, cloud], Again()).infer(REQUEST)
    assert (len(edge.seen), len(cloud.seen)) == (1, 1)


async def test_a_step_with_a_reserve_gets_the_callers_deadline_less_that() -> None:
    class CloudFirst:
        def rank(self, request: Request, targets: Mapping[str, Target], now: float) -> Plan:
            return Plan((Step(targets["cloud"], reserve_s=0.4), Step(targets["edge"], stays=True)))

    edge, cloud = FakeTarget("edge"), FakeTarget("cloud", DeadlineExceeded("m", "waiting"))
    asked = structs.replace(REQUEST, context=Context(deadline=1e6))
    assert (await Router([edge, cloud], CloudFirst()).infer(asked)).stamp.target == "edge"
    assert cloud.seen[0].context.deadline == 1e6 - 0.4
    assert edge.seen[0].context.deadline == 1e6


async def test_a_spent_retry_budget_does_not_keep_a_call_from_its_own_device() -> None:
    class CloudFirst:
        def rank(self, request: Request, targets: Mapping[str, Target], now: float) -> Plan:
            return Plan((Step(targets["cloud"], Reason.DEADLINE), Step(targets["edge"], stays=True)))

    clock, breakers = FakeClock(), TargetBreakers()
    edge, cloud = FakeTarget("edge"), FakeTarget("cloud", TargetUnreachable("cloud", "down"))
    router = Router([edge, cloud], CloudFirst(), breakers=breakers, clock=clock)
    for _ in range(40):
        assert (await router.infer(REQUEST)).stamp.target == "edge"
        clock.advance(6.0)  # so that each call is a probe of the dead cloud
    assert len(cloud.seen) >= 20
