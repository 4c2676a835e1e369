"""Errors on the wire and back."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import grpc
import pytest

from common import errors as e
from common.transport.status import error_from_grpc, status_of

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("exc", "http", "code"),
    [
        (e.InvalidInput("x", "bad"), 400, Code.INVALID_ARGUMENT),
        (e.OutsideProfile("m", "9 rows", "8"), 400, Code.INVALID_ARGUMENT),
        (e.ModelNotFound("m"), 404, Code.NOT_FOUND),
        (e.VersionNotFound("m", "1"), 404, Code.NOT_FOUND),
        (e.ModelNotReady("m", "being built"), 503, Code.UNAVAILABLE),
        (e.TargetUnreachable("cloud", "refused"), 503, Code.UNAVAILABLE),
        (e.DeadlineExceeded("m", "in the queue"), 503, Code.DEADLINE_EXCEEDED),
        (e.EngineError("m", "no memory"), 500, Code.INTERNAL),
        (e.TrustError("signature"), 500, Code.INTERNAL),
        (ValueError("secret"), 500, Code.INTERNAL),
    ],
)
def test_each_error_has_its_codes(exc: Exception, http: int, code: grpc.StatusCode) -> None:
    status = status_of(exc)
    assert (status.http, status.grpc) == (http, code)
    assert "secret" not in status.text
    assert status.is_ours == (http != 500 or isinstance(exc, e.EngineError))


@pytest.mark.parametrize(
    ("seconds", "says"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (math.inf, "60"), (math.nan, "60")]
)
def test_retry_after_is_whole_seconds_and_at_least_one(seconds: float, says: str) -> None:
    assert status_of(e.Unavailable("busy", retry_after_s=seconds)).headers == {"retry-after": says}


def test_other_errors_give_no_hint() -> None:
    status = status_of(e.ModelNotFound("m"))
    assert status.headers == status.trailers == {}


@pytest.mark.parametrize(
    ("seconds", "arrives"), [(0.05, 0.05), (0.0, 0.0), (1.2, 1.2), (math.inf, 60.0), (math.nan, 60.0), (-1.0, 0.0)]
)
def test_between_our_processes_the_hint_is_exact(seconds: float, arrives: float) -> None:
    trailing = status_of(e.Unavailable("busy", retry_after_s=seconds)).trailers
    error = error_from_grpc(Code.UNAVAILABLE, "busy", trailing, target="w1", model="m")
    assert isinstance(error, e.Unavailable)
    assert error.retry_after_s == pytest.approx(arrives)


def test_a_hint_may_be_a_date() -> None:
    """RFC 9110, 10.2.3; a date in the past is now, and what is no date is a second."""

    def seconds(text: str) -> float:
        error = error_from_grpc(Code.UNAVAILABLE, "busy", {"retry-after": text}, target="proxy", model="m")
        assert isinstance(error, e.Unavailable)
        return error.retry_after_s

    assert seconds(format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)) == pytest.approx(30, abs=3)
    assert seconds("Sun, 06 Nov 1994 08:49:37 GMT") == 0.0
    assert [seconds(text) for text in ("soon", "", "-5", "1.5", "Sun, 99 Nov 1994")] == [1.0] * 5


@pytest.mark.parametrize(
    ("code", "text", "trailing", "kind"),
    [
        (Code.INVALID_ARGUMENT, "bad", {}, e.InvalidRequest),
        (Code.UNIMPLEMENTED, "no such method", {}, e.InvalidRequest),
        (Code.NOT_FOUND, "no", {}, e.NotFound),
        (Code.DEADLINE_EXCEEDED, "late", {}, e.DeadlineExceeded),
        (Code.UNAVAILABLE, "busy", {"retry-after": "3"}, e.Unavailable),
        (Code.UNAVAILABLE, "Connection reset by peer", {}, e.TargetUnreachable),
        (Code.CANCELLED, "server is gone", {}, e.TargetUnreachable),
        (Code.INTERNAL, "Received RST_STREAM with error code 2", {}, e.TargetUnreachable),
        (Code.INTERNAL, "no memory", {}, e.EngineError),
        (Code.UNKNOWN, "what", {}, e.EngineError),
        (Code.RESOURCE_EXHAUSTED, "Received message larger than max (5 vs. 4)", {}, e.InvalidRequest),
        (Code.RESOURCE_EXHAUSTED, "quota", {}, e.Unavailable),
    ],
)
def test_codes_of_a_peer_become_our_errors(
    code: grpc.StatusCode, text: str, trailing: dict[str, str], kind: type[Exception]
) -> None:
    error = error_from_grpc(code, text, trailing, target="w1", model="m")
    assert type(error) is kind
    if trailing:
        assert isinstance(error, e.Unavailable)
        assert error.retry_after_s == 3.0
