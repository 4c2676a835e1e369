"""The gRPC client against services that lie. Against an honest one: tests/sync/test_service.py."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from common.errors import FetchError
from sync.agent.client import GrpcSource
from sync.agent.ports import Range
from sync.proto import sync_pb2, sync_pb2_grpc

NAME = "objects/ab/x.full"
WHOLE = Range(name=NAME, limit=100)
PARTS = [Range(name=NAME, offset=10, length=3), Range(name=NAME, offset=13, length=2)]


def piece(data: bytes, *, size: int, offset: int = 0, number: int = 0, is_missing: bool = False) -> sync_pb2.Piece:
    return sync_pb2.Piece(range=number, file_bytes=size, offset=offset, data=data, is_missing=is_missing)


class Liar(sync_pb2_grpc.SyncServicer):
    def __init__(self, answer: Callable[[], Iterator[sync_pb2.Piece]]) -> None:
        self._answer = answer

    def Fetch(self, request: sync_pb2.FetchRequest, context: Any) -> Iterator[sync_pb2.Piece]:  # noqa: N802
        return self._answer()


@contextlib.contextmanager
def lying(answer: Callable[[], Iterator[sync_pb2.Piece]], timeout_s: float = 10.0) -> Iterator[GrpcSource]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        sync_pb2_grpc.add_SyncServicer_to_server(Liar(answer), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        source = GrpcSource(f"127.0.0.1:{port}", timeout_s=timeout_s)
        try:
            yield source
        finally:
            source.close()
            server.stop(None).wait()


def test_a_file_may_come_in_pieces() -> None:
    pieces = [piece(b"abc", size=5), piece(b"de", size=5, offset=3)]
    with lying(lambda: iter(pieces)) as source:
        assert list(source.fetch([WHOLE])) == [b"abcde"]


def test_pieces_need_not_end_where_ranges_do() -> None:
    for cuts in ([5], [1, 5], [4, 5], [1, 2, 3, 4, 5]):
        starts = [0, *cuts[:-1]]
        pieces = [piece(b"abcde"[a:b], size=99, offset=10 + a) for a, b in zip(starts, cuts, strict=True)]
        with lying(lambda pieces=pieces: iter(pieces)) as source:  # type: ignore[misc]
            assert list(source.fetch(PARTS)) == [b"abc", b"de"]


def test_what_is_missing_and_what_is_cut_short_is_none() -> None:
    pieces = [piece(b"", size=0, offset=10, is_missing=True), piece(b"xyz", size=3, number=1)]
    with lying(lambda: iter(pieces)) as source:
        assert list(source.fetch([*PARTS, WHOLE])) == [None, None, b"xyz"]
    pieces = [piece(b"abcd", size=14, offset=10), piece(b"xyz", size=3, number=1)]
    with lying(lambda: iter(pieces)) as source:
        assert list(source.fetch([*PARTS, WHOLE])) == [b"abc", None, b"xyz"]


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [piece(b"abc", size=5)],
        [piece(b"abc", size=5), piece(b"de", size=5, offset=4)],
        [piece(b"abc", size=5), piece(b"de", size=9, offset=3)],
        [piece(b"abc", size=5), piece(b"", size=5, offset=3)],
        [piece(b"abc", size=3, number=1)],
        [piece(b"", size=5)],
        [piece(b"abc", size=1 << 40)],
        [piece(bytes(3000), size=3000)],
        [piece(b"abcdef", size=5)],
        [piece(b"abc", size=3, is_missing=True)],
    ],
)
def test_an_answer_out_of_order_short_or_too_long_is_an_error(pieces: list[sync_pb2.Piece]) -> None:
    with lying(lambda: iter(pieces)) as source, pytest.raises(FetchError):
        list(source.fetch([WHOLE]))


def test_more_than_the_range_is_an_error() -> None:
    with lying(lambda: iter([piece(b"abcdef", size=99, offset=10)])) as source, pytest.raises(FetchError):
        list(source.fetch(PARTS))


def test_endless_data_is_cut_off_at_what_was_announced() -> None:
    sent = []

    def endless() -> Iterator[sync_pb2.Piece]:
        for i in range(100_000):
            sent.append(i)
            yield piece(bytes(64), size=100, offset=64 * i)

    with lying(endless) as source, pytest.raises(FetchError):
        list(source.fetch([WHOLE]))
    assert len(sent) < 10_000


def test_a_service_that_never_answers_runs_into_the_deadline() -> None:
    released = threading.Event()

    def silent() -> Iterator[sync_pb2.Piece]:
        released.wait(10)
        return iter(())

    with lying(silent, timeout_s=0.2) as source:
        with pytest.raises(FetchError, match="DEADLINE_EXCEEDED") as caught:
            list(source.fetch([WHOLE]))
        released.set()
    assert not caught.value.is_permanent


def test_a_method_that_the_service_lacks_is_permanent() -> None:
    with lying(lambda: iter(())) as source, pytest.raises(FetchError, match="UNIMPLEMENTED") as caught:
        list(source.read("metadata/timestamp.json"))
    assert caught.value.is_permanent
