"""Lines that people read: which events make one, and in which form."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from common.request import Priority
from common.telemetry.events import CacheFault, EngineSwapped, RequestDone, TargetFailed
from common.telemetry.logs import EventLog, log, set_up

DONE = RequestDone(
    request_id="1", model="m", version="1", target="edge", reason=None, priority=Priority.BATCH, seconds=1
)
FAILED = TargetFailed(request_id="1", model="m", target="cloud", error="gone")


class Clock:
    time = 0.0

    def monotonic(self) -> float:
        return self.time

    def now(self) -> datetime:
        return datetime.now(UTC)


@pytest.fixture(autouse=True)
def _root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def lines() -> io.StringIO:
    stream = io.StringIO()
    set_up("json", stream=stream)
    return stream


def read(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_swap_is_one_json_line(lines: io.StringIO) -> None:
    EventLog()(EngineSwapped(model="m", old_version="1", new_version="2"))
    (line,) = read(lines)
    assert datetime.fromisoformat(str(line.pop("time"))).tzinfo is UTC
    assert line == {
        "level": "info",
        "logger": "outrider",
        "message": "engine swapped",
        "model": "m",
        "old": "1",
        "new": "2",
    }


def test_calls_are_not_logged_but_engine_errors_are(lines: io.StringIO) -> None:
    hook = EventLog()
    for error in ("", "InvalidInput", "DeadlineExceeded", "CancelledError", "EngineError"):
        hook(RequestDone(**{f: getattr(DONE, f) for f in DONE.__slots__ if f != "error"}, error=error))
    assert [line["message"] for line in read(lines)] == ["call failed"]


def test_a_fault_that_repeats_is_one_line_a_second(lines: io.StringIO) -> None:
    clock = Clock()
    hook = EventLog(clock)
    for clock.time in (0.0, 0.1, 0.9, 1.1, 1.2):
        hook(FAILED)
        hook(CacheFault(problem="disk full"))
    got = [(line["message"], line.get("left_out")) for line in read(lines)]
    assert got == [
        ("target did not answer", None),
        ("cache fault", None),
        ("target did not answer", 2),
        ("cache fault", 2),
    ]


def test_targets_are_counted_apart(lines: io.StringIO) -> None:
    hook = EventLog(Clock())
    hook(FAILED)
    hook(TargetFailed(request_id="2", model="m", target="edge", error="busy"))
    assert [line["target"] for line in read(lines)] == ["cloud", "edge"]


def test_text_form_keeps_one_event_on_one_line() -> None:
    stream = io.StringIO()
    set_up("text", stream=stream)
    log("it broke", logging.WARNING, error="first\nsecond")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("WARNING outrider: it broke error=first\\nsecond")


def test_text_form_says_nothing_to_a_terminal() -> None:
    stream = io.StringIO()
    set_up("text", stream=stream)
    log("it broke", error="\x1b[2Jgone\x9b1m\u2028new\ud800é", logging_of=3)
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("it broke error=\\x1b[2Jgone\\x9b1m\\u2028new\\ud800é logging_of=3")


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_long_value_is_cut_and_its_key_not_kept(form: str) -> None:
    stream = io.StringIO()
    set_up(form, stream=stream)  # type: ignore[arg-type]
    hook = EventLog(Clock())
    for last in "ab":  # alike as far as they are kept
        hook(TargetFailed(request_id="1", model="m" * 100_000 + last, target="cloud", error="e" * 100_000))
    assert len(stream.getvalue().splitlines()) == 1
    assert 4000 < len(stream.getvalue()) < 4500
    assert "m" * 2000 + "..." in stream.getvalue()


@pytest.mark.parametrize("form", ["json", "text"])
def test_tracebacks_are_kept(form: str) -> None:
    stream = io.StringIO()
    set_up(form, stream=stream)  # type: ignore[arg-type]
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("x").exception("it broke")
    assert "ValueError: why" in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 1 or form == "text"
