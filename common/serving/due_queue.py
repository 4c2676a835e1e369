"""A heap of items from which any may leave: what left is dropped in time, never searched for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Leaving(Protocol):
    is_gone: bool


T = TypeVar("T", bound=Leaving)


class DueQueue(Generic[T]):
    """Earliest due first, then first come. `rows`: of the items in it, kept by its owner."""

    __slots__ = ("_gone", "_heap", "rows")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._gone = 0
        self.rows = 0

    def __len__(self) -> int:
        """Entries held, those of items that left included."""
        return len(self._heap)

    def push(self, due: float, order: int, item: T) -> None:
        heapq.heappush(self._heap, (due, order, item))

    def first(self) -> tuple[float, int, T] | None:
        heap = self._heap
        while heap and heap[0][2].is_gone:
            heapq.heappop(heap)
            self._gone = max(0, self._gone - 1)
        return heap[0] if heap else None

    def pop(self) -> tuple[float, int, T]:
        """The first entry; after `first` has said that there is one."""
        return heapq.heappop(self._heap)

    def pop_while(self, holds: Callable[[T], bool]) -> list[tuple[float, int, T]]:
        """Takes out the first entries for as long as `holds`."""
        taken: list[tuple[float, int, T]] = []
        while (entry := self.first()) is not None and holds(entry[2]):
            taken.append(heapq.heappop(self._heap))
        return taken

    def put_back(self, entries: list[tuple[float, int, T]]) -> None:
        for entry in entries:
            heapq.heappush(self._heap, entry)

    def has_left(self) -> None:
        """An item somewhere in the heap is gone. Once most are, the heap is made anew without them."""
        self._gone += 1
        if self._gone > 16 and self._gone > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].is_gone]
            heapq.heapify(self._heap)
            self._gone = 0
