"""A `Source` that reads a store's folder behind any plain web server or CDN: no code of ours runs there.

Ranges travel as HTTP ranges, those that follow one another as one. A server that ignores them answers with the whole
file: of that only as much is read as was asked for, and what follows in the same file is taken from the same answer.
Each call ends within its time whatever the server does. Used from one thread; `close` from any.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import re
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from common.errors import FetchError
from sync.agent.http_body import HttpBody
from sync.agent.http_connection import Answer, Endpoint, HttpConnection
from sync.agent.paced import Pace
from sync.agent.ports import Part, Range, never
from sync.agent.ranges import joined, whole

_CHUNK_BYTES: Final = 64 << 10
_MOST_WAIT_S: Final = 3600.0  # that a server can ask for
_GONE: Final = (404, 410)
_LATER: Final = (408, 425, 429)  # and everything from 500 on
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


class HttpSource:
    """Reads below `url` (http://, https://). Each call ends within `timeout_s`. `pace`: how fast it may and must go."""

    def __init__(self, url: str, *, timeout_s: float, pace: Pace | None = None) -> None:
        self._endpoint, self._timeout_s = Endpoint.parse(url), timeout_s
        self._connection, self._pace = HttpConnection(self._endpoint), pace or Pace()
        self._running = threading.Lock()  # whoever has it may touch the connection
        self._not_before, self._is_closed = 0.0, False

    def read(self, name: str) -> Iterator[bytes]:
        call = self._chunks(name)
        with self._pace.reading(call, cut=self._connection.cut, what=name, size=len, cancelled=never) as chunks:
            yield from chunks

    def stream(self, ranges: Sequence[Range], *, cancelled: Callable[[], bool] = never) -> Iterator[Part]:
        call, cut = self._parts(joined(ranges)), self._connection.cut
        with self._pace.reading(call, cut=cut, what="slabs", size=_bytes_of, cancelled=cancelled) as parts:
            yield from parts

    def fetch(self, ranges: Sequence[Range]) -> Iterator[bytes | None]:
        return whole(self.stream(ranges))

    def close(self) -> None:
        """A call that is running breaks off."""
        self._is_closed = True
        self._connection.cut()
        if self._running.acquire(blocking=False):
            self._connection.drop()
            self._running.release()

    # --- in the thread of a call ---

    def _chunks(self, name: str) -> Generator[bytes, None, None]:
        with self._call(name):
            answer = self._get(name, {})
            if answer.status != 200:
                raise self._refused(name, answer)
            while data := answer.read(_CHUNK_BYTES):
                yield data
            self._done(answer)

    def _parts(self, groups: Sequence[Sequence[Range]]) -> Generator[Part, None, None]:
        with self._call("slabs"):
            body, number = None, 0
            for group in groups:
                if body is not None and not body.leads_to(group[0]):
                    self._done(body.answer)
                    body = None
                body = body or self._open(group[0], sum(one.length for one in group))
                for one in group:
                    if body is None:
                        yield Part(number=number, data=b"", is_last=True, is_missing=True)
                    else:
                        yield from body.parts(number, one)
                    number += 1
            if body is not None:
                self._done(body.answer)

    def _open(self, one: Range, length: int) -> HttpBody | None:
        """From the start of `one` on, `length` bytes (0: the rest). None where there is no such file, or nothing at
        that place."""
        wanted = f"bytes={one.offset}-{one.offset + length - 1 if length else ''}"
        answer = self._get(one.name, {"range": wanted} if one.offset or length else {})
        if answer.status == 200:  # the whole file, whatever was asked for
            return HttpBody(one.name, answer, start=0, end=answer.length)
        if answer.status == 416 and answer.headers.get("content-range") == f"bytes */{one.offset}":
            self._done(answer)
            return HttpBody(one.name, answer, start=one.offset, end=one.offset)
        if answer.status in (*_GONE, 416):
            self._done(answer)
            return None
        if answer.status != 206:
            raise self._refused(one.name, answer)
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
        start, end = (int(found[1]), int(found[2]) + 1) if found else (-1, -1)
        most = one.offset + length if length else end
        if start != one.offset or not start < end <= most or answer.length not in (None, end - start):
            problem = f"{wanted} was asked for, {answer.headers.get('content-range')!r} came"
            raise FetchError(one.name, problem, is_permanent=True)
        return HttpBody(one.name, answer, start=start, end=end)

    def _get(self, name: str, headers: dict[str, str]) -> Answer:
        answer = self._connection.get(name, headers, timeout_s=self._timeout_s)
        encoding = answer.headers.get("content-encoding", "identity")
        if answer.status in (200, 206) and encoding != "identity":
            problem = f"comes in content-encoding {encoding}; accepted: the file as it is"
            raise FetchError(name, problem, is_permanent=True)
        return answer

    def _done(self, answer: Answer) -> None:
        """Nothing more of it is wanted: the connection stays where little is left."""
        if not answer.is_read():
            self._connection.drop()

    def _refused(self, name: str, answer: Answer) -> FetchError:
        is_later = answer.status in _LATER or answer.status >= 500
        if is_later:
            wait_s = min(_retry_after(answer.headers.get("retry-after", "")), _MOST_WAIT_S)
            self._not_before = time.monotonic() + wait_s
        reason = http.client.responses.get(answer.status, "")
        problem = f"{answer.status} {reason} from {self._endpoint.origin}"
        return FetchError(name, problem, is_permanent=not is_later)

    @contextlib.contextmanager
    def _call(self, what: str) -> Iterator[None]:
        """The time limit and the errors of one call. A call that does not end well leaves no connection behind."""
        wait_s = self._not_before - time.monotonic()
        if wait_s > 0:
            raise FetchError(what, f"{self._endpoint.origin} asked to be left alone for {wait_s:.0f} s more")
        ends_at = time.monotonic() + self._timeout_s
        timer = threading.Timer(self._timeout_s, self._connection.cut)
        timer.daemon = True
        timer.start()
        is_whole = False
        self._running.acquire()
        try:
            if self._is_closed:
                raise FetchError(what, "the source is closed")
            yield
            is_whole = True
        except (OSError, http.client.HTTPException) as exc:
            problem = "broken off" if self._is_closed else _in_words(exc)
            if time.monotonic() >= ends_at:
                problem = f"not done within {self._timeout_s:g} s"
            raise FetchError(what, f"{self._endpoint.origin}: {problem}") from exc
        finally:
            timer.cancel()
            if not is_whole or self._is_closed:
                self._connection.drop()
            self._running.release()


def _bytes_of(part: Part) -> int:
    return len(part.data)


def _retry_after(text: str) -> float:
    """Seconds, or a date (RFC 9110, 10.2.3); 0 for neither."""
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        when = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def _in_words(exc: Exception) -> str:
    if isinstance(exc, http.client.IncompleteRead):
        return "the answer ended early"
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate is not to be believed: {exc.verify_message}"
    return str(exc) or type(exc).__name__
