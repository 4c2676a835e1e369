"""What an HTTP answer has of a file, cut into the ranges that were asked for; not a byte more is read."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Final

from common.errors import FetchError
from sync.agent.http_connection import Answer
from sync.agent.ports import Part, Range

_CHUNK_BYTES: Final = 64 << 10


class HttpBody:
    """The bytes [start, end) of a file as they come in; `end` None: until the answer ends."""

    def __init__(self, name: str, answer: Answer, *, start: int, end: int | None) -> None:
        self.answer = answer
        self._name, self._at, self._end = name, start, end

    def leads_to(self, one: Range) -> bool:
        """Is the start of that range still to come?"""
        is_ahead = self._at <= one.offset and (self._end is None or one.offset < self._end)
        return bool(one.length) and one.name == self._name and is_ahead

    def parts(self, number: int, one: Range) -> Iterator[Part]:
        """The next range, as part `number`; the last one says so where the file does not have all of it."""
        end = one.offset + one.length if one.length else self._end
        if not one.length:
            self._check_limit(one, max(self._end or 0, one.offset))
        is_short = self._end is not None and not one.offset <= (end or 0) <= self._end
        if is_short or not self._skip_to(one.offset):
            yield Part(number=number, data=b"", is_last=True, is_missing=True)
            return
        while end is None or self._at < end:
            most = _CHUNK_BYTES if end is None else end - self._at
            data = self._next(most)
            if not data:
                yield Part(number=number, data=b"", is_last=True, is_missing=end is not None)
                return
            if not one.length:
                self._check_limit(one, self._at)
            yield Part(number=number, data=data, is_last=self._at == end)
        if one.offset == end:
            yield Part(number=number, data=b"", is_last=True)

    def _skip_to(self, offset: int) -> bool:
        while self._at < offset:
            if not self._next(offset - self._at):
                return False
        return True

    def _next(self, most: int) -> bytes:
        data = self.answer.read(min(most, _CHUNK_BYTES))
        if not data and self._end is not None and self._at < self._end:
            raise http.client.IncompleteRead(b"", self._end - self._at)
        self._at += len(data)
        return data

    def _check_limit(self, one: Range, size: int) -> None:
        if size > one.limit:
            problem = f"endless data: {size} bytes or more come, at most {one.limit} make sense"
            raise FetchError(one.name, problem, is_permanent=True)
