"""Ranges from a source whose connection may break at any byte: what has come is kept, the rest is asked for anew.

Goes on at once as long as every try brings something; otherwise the error is the caller's, and what has come of a range
waits in a file for the next download. Malformed answers and sources that are too slow are not asked again here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from common.errors import FetchCancelled, FetchError, SlowSource
from sync.agent.partial import Partials
from sync.agent.ports import Part, Range, Source, Streaming, never

BYTES_PER_BREAK: Final = 4 << 10  # that a source has to bring on average to be asked again
FREE_BREAKS: Final = 16
_PAUSES_S: Final = (0.1, 0.4)  # without a byte in between; after that it is the caller's turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A range as it came. `is_resumed`: some of it was on the disk, from an earlier try; `received`: bytes came now."""

    data: bytes | None  # None: no such file, or less of it
    is_resumed: bool = False
    received: int = 0


class Download:
    """Everything that one assembly asks of a source."""

    def __init__(self, source: Source, partials: Partials, cancelled: Callable[[], bool] = never) -> None:
        self._source, self._partials, self._cancelled = source, partials, cancelled
        self._received = 0  # bytes
        self.breaks = 0

    def get(self, ranges: Sequence[Range], *, keeps: int = 0) -> Generator[Answer, None, None]:
        """One for each of `ranges`, in their order. The first `keeps` of them stay on the disk for the next try.

        Raises `FetchError`, or `FetchCancelled`.
        """
        done, idle = 0, 0
        while done < len(ranges):
            before = self._received
            try:
                for answer in self._ask(ranges[done:], keeps - done):
                    done += 1
                    yield answer
            except FetchError as exc:
                idle = 0 if self._received > before else idle + 1
                if not self._is_worth_it(exc, idle):
                    raise
                self.breaks += 1
                self._pause(_PAUSES_S[idle - 1] if idle else 0.0)

    def begun(self, one: Range) -> int:
        """How many bytes of a range an earlier try left here."""
        return self._partials.bytes_of(one)

    def forget(self, one: Range) -> None:
        """What is here of a range turned out to be wrong."""
        self._partials.forget(one)

    def _is_worth_it(self, exc: FetchError, idle: int) -> bool:
        """To ask again now. A source that gives away a few bytes each time is not."""
        is_over = exc.is_permanent or isinstance(exc, SlowSource) or not self._received
        return not is_over and idle <= len(_PAUSES_S) and self.breaks < FREE_BREAKS + self._received / BYTES_PER_BREAK

    def _ask(self, ranges: Sequence[Range], keeps: int) -> Iterator[Answer]:
        if not isinstance(self._source, Streaming):
            yield from self._ask_whole(self._source, ranges)
            return
        here = [self._partials.bytes_of(one) for one in ranges]
        asked = {
            number: _rest(one, here[number])
            for number, one in enumerate(ranges)
            if not one.length or here[number] < one.length
        }
        parts = self._source.stream(list(asked.values()), cancelled=self._cancelled) if asked else iter(())
        for number, one in enumerate(ranges):
            if number in asked:
                yield self._one(one, parts, is_resumed=here[number] > 0, keeps=number < keeps)
            else:
                yield Answer(data=self._partials.take(one, keeps=number < keeps), is_resumed=True)

    def _one(self, one: Range, parts: Iterator[Part], *, is_resumed: bool, keeps: bool) -> Answer:
        received = 0
        for part in parts:
            self._received, received = self._received + len(part.data), received + len(part.data)
            if part.is_missing:
                self._partials.forget(one)
                return Answer(data=None, is_resumed=is_resumed)
            if part.is_last:
                data = self._partials.take(one, part.data, keeps=keeps)
                return Answer(data=data, is_resumed=is_resumed, received=received)
            self._partials.add(one, part.data)
        raise FetchError(one.name, "the answer ended early", is_permanent=True)

    def _ask_whole(self, source: Source, ranges: Sequence[Range]) -> Iterator[Answer]:
        """A source that knows no parts."""
        answers = source.fetch(ranges)
        for one in ranges:
            if self._cancelled():
                raise FetchCancelled(one.name)
            try:
                data = next(answers)
            except StopIteration:
                raise FetchError(one.name, "the answer ended early", is_permanent=True) from None
            self._received += len(data or b"")
            yield Answer(data=data, received=len(data or b""))

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._cancelled():
                raise FetchCancelled("slabs")
            time.sleep(min(left, 0.1))


def _rest(one: Range, begun: int) -> Range:
    return replace(one, offset=one.offset + begun, length=one.length - begun if one.length else 0)
