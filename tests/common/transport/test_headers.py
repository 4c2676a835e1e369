"""What the headers of a call mean, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidInput
from common.request import DEFAULT_TENANT, Context, Priority, Privacy, Reason
from common.transport.headers import Said, read_context, write_context
from common.transport.tenants import OUR_PROCESS

NOW = 100.0
TRACE = "00-" + "0" * 31 + "1-" + "0" * 15 + "2-01"


def test_a_call_without_headers_has_the_defaults() -> None:
    context = read_context({}, Said(), NOW)
    assert context == Context(id=context.id)
    assert context.id
    assert context.id != read_context({}, Said(), NOW).id
    assert context.tenant == DEFAULT_TENANT


@pytest.mark.parametrize(
    ("header", "timeout", "transport", "deadline"),
    [
        ("250", 0, math.inf, 100.25),
        ("250", 100_000, math.inf, 100.1),
        ("250", 900_000, 0.05, 100.05),
        ("0.5", 900_000, 3.0, 100.0005),
        ("0", 0, math.inf, 100.0),
    ],
)
def test_the_smallest_deadline_that_is_set_counts(header: str, timeout: int, transport: float, deadline: float) -> None:
    said = Said(parameters={"timeout": timeout}, remaining_s=transport)
    context = read_context({"x-outrider-deadline-ms": header}, said, NOW)
    assert context.deadline == pytest.approx(deadline)


@pytest.mark.parametrize(
    ("headers", "parameters", "priority"),
    [
        ({"x-outrider-priority": "batch"}, {}, Priority.BATCH),
        ({"x-outrider-priority": "Realtime"}, {}, Priority.REALTIME),
        ({"x-outrider-priority": "4"}, {"priority": 1}, Priority.OFFLINE),
        ({}, {"priority": 1}, Priority.REALTIME),
        ({}, {"priority": 0}, Priority.INTERACTIVE),
    ],
)
def test_priority(headers: dict[str, str], parameters: dict[str, int], priority: Priority) -> None:
    assert read_context(headers, Said(parameters=parameters), NOW).priority is priority


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("x-outrider-deadline-ms", v) for v in ("", "-1", "nan", "inf", "1e3", "1_0", " 5", "٣", "5" * 30)),
        *(("x-outrider-priority", v) for v in ("", "0", "5", "urgent")),
        *(("x-outrider-privacy", v) for v in ("", "secret")),
        *(("x-outrider-request-id", v) for v in ("", "a b", "é", "x" * 129)),
        *(("x-outrider-attempt", v) for v in ("", "0", "-1", "9", "1.0", "2, 3", "9" * 400)),
        ("x-outrider-reason", "because"),
        ("x-outrider-pin", "2"),
    ],
)
def test_bad_header_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_context({name: value}, Said(version="1"), NOW, caller=OUR_PROCESS)
    assert caught.value.where == name


HEADED = {"x-outrider-priority": "batch", "x-outrider-deadline-ms": "1"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", -1),
        ("timeout", 1.5),
        ("timeout", True),
        ("timeout", "1"),
        ("priority", -1),
        ("priority", 5),
        ("priority", True),
        ("priority", "1"),
    ],
)
def test_bad_parameter_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_context({}, Said(parameters={name: value}), NOW)  # type: ignore[dict-item]
    assert caught.value.where == f"parameters.{name}"
    with pytest.raises(InvalidInput):  # also where a header goes before it
        read_context(HEADED, Said(parameters={name: value}), NOW)  # type: ignore[dict-item]


def test_a_strangers_word_on_tenant_and_reason_does_not_count() -> None:
    context = read_context({"x-outrider-tenant": "boss", "x-outrider-reason": "overload"}, Said(), NOW)
    assert (context.tenant, context.reason) == (DEFAULT_TENANT, None)


def test_the_messages_id_stands_in_for_the_header() -> None:
    assert read_context({}, Said(id="body-1"), NOW).id == "body-1"
    assert read_context({"x-outrider-request-id": "head-1"}, Said(id="body-1"), NOW).id == "head-1"
    assert read_context({}, Said(id="two words"), NOW).id != "two words"


@pytest.mark.parametrize(("text", "kept"), [(TRACE, TRACE), ("nonsense", ""), (TRACE + "\n", "")])
def test_only_a_well_formed_trace_is_passed_on(text: str, kept: str) -> None:
    assert read_context({"traceparent": text}, Said(), NOW).traceparent == kept


@pytest.mark.parametrize("timeout", [2**63 - 1, 2**64 - 1])
def test_a_deadline_beyond_a_lifetime_is_none(timeout: int) -> None:
    assert read_context({}, Said(parameters={"timeout": timeout}), NOW).deadline == math.inf
    assert read_context({"x-outrider-deadline-ms": "9" * 15}, Said(), NOW).deadline == math.inf
    assert "x-outrider-deadline-ms" not in write_context(Context(deadline=NOW + 1e12), NOW)


@given(
    st.builds(
        Context,
        id=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=128),
        priority=st.sampled_from(Priority),
        privacy=st.sampled_from(Privacy),
        reason=st.sampled_from([None, *Reason]),
        deadline=st.just(math.inf) | st.floats(NOW, NOW + 1e6),
        traceparent=st.sampled_from(["", TRACE]),
        attempt=st.integers(1, 8),
    )
)
def test_context_round_trip(context: Context) -> None:
    back = read_context(write_context(context, NOW), Said(), NOW, caller=OUR_PROCESS)
    assert back.deadline == pytest.approx(context.deadline, abs=1e-6)
    for field in ("id", "priority", "privacy", "reason", "traceparent", "attempt"):
        assert getattr(back, field) == getattr(context, field)
