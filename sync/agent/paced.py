"""A call that is an iterator of ours, read like a gRPC call: with a rate limit, a floor and a way to break it off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final

from sync.agent.pace import Bucket, Floor
from sync.agent.reading import Reading

FLOOR_BYTES_S: Final = 512.0
FLOOR_WINDOW_S: Final = 20.0


class Pace:
    """How fast all calls of one source may come in together (`rate_bytes_s`), and have to."""

    def __init__(
        self,
        rate_bytes_s: float | None = None,
        floor_bytes_s: float = FLOOR_BYTES_S,
        floor_window_s: float = FLOOR_WINDOW_S,
    ) -> None:
        self._bucket = None if rate_bytes_s is None else Bucket(rate_bytes_s)
        self._floor_bytes_s, self._floor_window_s = floor_bytes_s, floor_window_s

    @contextlib.contextmanager
    def reading(
        self,
        pieces: Generator[Any, None, None],
        *,
        cut: Callable[[], None],
        what: str,
        size: Callable[[Any], int],
        cancelled: Callable[[], bool],
    ) -> Iterator[Iterator[Any]]:
        """`pieces` run in a thread of their own until the block ends; `cut` makes one that waits fail."""
        call = _Call(pieces, cut)
        floor = Floor(self._floor_bytes_s, self._floor_window_s)
        try:
            with Reading(call, what=what, size=size, floor=floor, bucket=self._bucket, cancelled=cancelled) as messages:
                yield iter(messages)
        finally:
            pieces.close()


class _Call:
    def __init__(self, pieces: Iterator[Any], cut: Callable[[], None]) -> None:
        self._pieces, self._cut, self._is_over = pieces, cut, False

    def __next__(self) -> Any:
        try:
            return next(self._pieces)
        except BaseException:
            self._is_over = True
            raise

    def cancel(self) -> None:
        """What has come to its end is not cut off."""
        if not self._is_over:
            self._cut()
