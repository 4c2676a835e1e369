"""A `Source` that reads a store in an S3 bucket without a service between. Credentials: `sync/store/bucket.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final

from common.errors import BucketError, FetchError
from sync.agent.paced import Pace
from sync.agent.ports import Part, Range, never
from sync.agent.ranges import joined, whole
from sync.store.bucket import Bucket

_MOST_OFFSET: Final = 1 << 62


class S3Source:
    """`address`: s3://bucket/prefix. Each request ends within `timeout_s`, its one repetition included."""

    def __init__(self, address: str, *, timeout_s: float, pace: Pace | None = None) -> None:
        self._bucket, self._pace = Bucket(address, timeout_s=timeout_s, retries=1), pace or Pace()
        self._is_closed = False

    def read(self, name: str) -> Iterator[bytes]:
        with self._pace.reading(self._chunks(name), cut=_wait, what=name, size=len, cancelled=never) as chunks:
            for chunk in chunks:
                self._check(name)
                yield chunk

    def stream(self, ranges: Sequence[Range], *, cancelled: Callable[[], bool] = never) -> Iterator[Part]:
        call = self._parts(joined(ranges))
        with self._pace.reading(call, cut=_wait, what="slabs", size=_bytes_of, cancelled=cancelled) as parts:
            for part in parts:
                self._check("slabs")
                yield part

    def fetch(self, ranges: Sequence[Range]) -> Iterator[bytes | None]:
        return whole(self.stream(ranges))

    def close(self) -> None:
        """A call that is running ends with its next piece."""
        self._is_closed = True

    # --- in the thread of a call ---

    def _chunks(self, name: str) -> Generator[bytes, None, None]:
        with _told(name):
            self._check(name)
            found = self._bucket.stream(name)
            if found is None:
                raise FetchError(name, f"is not in {self._bucket.address}", is_permanent=True)
            yield from found.chunks

    def _parts(self, groups: Sequence[Sequence[Range]]) -> Generator[Part, None, None]:
        number = 0
        for group in groups:
            with _told(group[0].name):
                self._check(group[0].name)
                yield from self._group(number, group)
            number += len(group)

    def _group(self, number: int, group: Sequence[Range]) -> Iterator[Part]:
        start, length = group[0].offset, sum(one.length for one in group)
        found = None
        if start + length < _MOST_OFFSET:
            found = self._bucket.stream(group[0].name, start=start, length=length or None)
        if found is not None and not length and found.size > group[0].limit:
            problem = f"endless data: {found.size} bytes are there, at most {group[0].limit} make sense"
            raise FetchError(group[0].name, problem, is_permanent=True)
        chunks, data = iter(()) if found is None else found.chunks, b""
        for one in group:
            end = one.offset + one.length if one.length else max(start, 0 if found is None else found.size)
            if found is None or end > found.size:
                yield Part(number=number, data=b"", is_last=True, is_missing=True)
            else:
                left = end - one.offset
                while True:
                    taken, data = data[:left], data[left:]
                    left -= len(taken)
                    yield Part(number=number, data=taken, is_last=not left)
                    if not left:
                        break
                    data = next(chunks, b"")
                    if not data:
                        raise FetchError(one.name, "the answer ended early")
            number += 1

    def _check(self, what: str) -> None:
        if self._is_closed:
            raise FetchError(what, "the source is closed")


def _wait() -> None:
    """A request under way cannot be broken off: its time limit ends it."""


def _bytes_of(part: Part) -> int:
    return len(part.data)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except BucketError as exc:
        raise FetchError(what, str(exc), is_permanent=exc.is_permanent) from exc
