"""What a sync service says to a `Fetch`, held against what was asked: pieces that follow one another, no byte more.

Anything else is a permanent `FetchError`: asking such a service again would not help.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.errors import FetchError
from sync.agent.ports import Part, Range
from sync.proto import sync_pb2


def request(groups: Sequence[Sequence[Range]], piece_bytes: int) -> sync_pb2.FetchRequest:
    """For ranges that were `joined`."""
    return sync_pb2.FetchRequest(
        ranges=[
            sync_pb2.Range(name=group[0].name, offset=group[0].offset, length=sum(one.length for one in group))
            for group in groups
        ],
        piece_bytes=piece_bytes,
    )


def parts(groups: Sequence[Sequence[Range]], pieces: Iterator[sync_pb2.Piece]) -> Iterator[Part]:
    """Numbered as the ranges are over all groups; not more than a piece is in memory."""
    first = 0
    for number, group in enumerate(groups):
        yield from _Group(number, group, pieces).parts(first)
        first += len(group)


class _Group:
    """The answer to one range of the request, which may be several of ours."""

    def __init__(self, number: int, group: Sequence[Range], pieces: Iterator[sync_pb2.Piece]) -> None:
        self._number, self._group, self._pieces = number, group, pieces
        self._name, self._at = group[0].name, group[0].offset
        self._next_piece = self._next()
        self._file_bytes = int(self._next_piece.file_bytes)
        self._is_missing, limit = bool(self._next_piece.is_missing), sum(one.length for one in group)
        if not self._is_missing and not limit and self._file_bytes > group[0].limit:
            problem = f"endless data: {self._file_bytes} bytes announced, at most {group[0].limit} make sense"
            raise FetchError(self._name, problem, is_permanent=True)
        end = min(self._file_bytes, self._at + limit) if limit else self._file_bytes
        self._end = self._at if self._is_missing else max(self._at, end)

    def parts(self, first: int) -> Iterator[Part]:
        data = self._checked(self._next_piece)
        for number, one in enumerate(self._group, first):
            end = one.offset + one.length if one.length else self._file_bytes
            if self._is_missing or not one.offset <= end <= self._end:
                yield Part(number=number, data=b"", is_last=True, is_missing=True)
                continue
            while True:
                left = end - (self._at - len(data))
                taken, data = data[:left], data[left:]
                yield Part(number=number, data=taken, is_last=len(taken) == left)
                if len(taken) == left:
                    break
                data = self._checked(self._next())
        while self._at < self._end:  # the part of a range that the file does not have in full
            self._checked(self._next())

    def _next(self) -> sync_pb2.Piece:
        piece = next(self._pieces, None)
        if piece is None:
            raise FetchError(self._name, "the answer ended early", is_permanent=True)
        return piece

    def _checked(self, piece: sync_pb2.Piece) -> bytes:
        is_next = (piece.range, piece.offset, piece.file_bytes) == (self._number, self._at, self._file_bytes)
        left = self._end - self._at
        if not is_next or not min(left, 1) <= len(piece.data) <= left:
            raise FetchError(self._name, "the answer is out of order", is_permanent=True)
        self._at += len(piece.data)
        return bytes(piece.data)
