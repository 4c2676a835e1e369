"""The messages of one call, taken off the connection as they come, by a thread of the call's own.

What has come is not lost when the connection breaks while another slab is being decoded, and whoever waits here looks
up several times a second: is this still wanted, does it come fast enough?
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, Self

from common.errors import FetchCancelled, SlowSource
from sync.agent.pace import Bucket, Floor

CHECK_S: Final = 0.2
CHECK_BYTES: Final = 128 << 10
AHEAD_BYTES: Final = 8 << 20  # of messages that wait to be taken


class Reading:
    """Use as a context around the iteration."""

    def __init__(
        self,
        call: Any,
        *,
        what: str,
        size: Callable[[Any], int],
        floor: Floor,
        bucket: Bucket | None,
        cancelled: Callable[[], bool],
    ) -> None:
        """`call`: an iterator with `cancel()`. `size`: bytes that a message counts for."""
        self._call, self._what, self._size = call, what, size
        self._floor, self._bucket, self._cancelled = floor, bucket, cancelled
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._came, self._taken = 0, 0  # bytes
        self._waiting: tuple[float, float] = (0.0, time.monotonic())  # seconds, and since when again; 0: not now
        self._thread = threading.Thread(target=self._read, name="sync-fetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._is_over.set()
        self._call.cancel()
        self._thread.join()

    def __iter__(self) -> Iterator[Any]:
        """The messages; raises what the call raised, `SlowSource` or `FetchCancelled`."""
        check_at, unchecked = 0.0, 0  # the first look comes before the first byte
        while True:
            now = time.monotonic()
            if unchecked >= CHECK_BYTES or now >= check_at:
                self._check()
                check_at, unchecked = now + CHECK_S, 0
            try:
                message = self._messages.get(timeout=CHECK_S)
            except queue.Empty:
                continue
            if message is None:
                return
            if isinstance(message, Exception):
                raise message
            count = self._size(message)
            unchecked, self._taken = unchecked + count, self._taken + count
            yield message

    def _check(self) -> None:
        if self._cancelled():
            raise FetchCancelled(self._what)
        waited, since = self._waiting
        waited += time.monotonic() - since if since else 0.0
        slow = self._floor.slow(waited, self._came)
        if slow is not None:
            raise SlowSource(self._what, received=slow[1], seconds=slow[0], floor_bytes_s=self._floor.rate)

    def _read(self) -> None:
        try:
            for message in self._timed():
                self._messages.put(message)
            self._messages.put(None)
        except Exception as exc:  # the caller's to tell what it means
            self._messages.put(exc)

    def _timed(self) -> Iterator[Any]:
        """Only waiting for the other side counts, not what the rate limit or the reader makes of it."""
        waited = 0.0
        while not self._is_over.is_set():
            started = time.monotonic()
            self._waiting = (waited, started)
            message = next(self._call, None)
            now = time.monotonic()
            waited += now - started
            count = 0 if message is None else self._size(message)
            self._came += count
            self._waiting = (waited, 0.0)
            if message is None:
                return
            yield message
            pause = self._bucket.take(count, now) if self._bucket is not None else 0.0
            if pause:
                self._is_over.wait(pause)
            while self._came - self._taken > AHEAD_BYTES and not self._is_over.is_set():
                self._is_over.wait(0.01)
