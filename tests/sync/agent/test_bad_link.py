"""The gRPC client over links and against services that are slow, silent, broken or busy."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.errors import FetchCancelled, FetchError, SlowSource
from sync.agent.client import GrpcSource
from sync.agent.ports import Range
from sync.agent.reading import Reading
from sync.proto import sync_pb2, sync_pb2_grpc
from sync.service import MIN_CHUNK_BYTES, ServiceConfig
from tests.soak import cuts, reconnects
from tests.soak.cuts import cutter
from tests.sync.agent.test_client import Liar, piece
from tests.sync.fakes import World, running

NAME = "objects/ab/x.full"
BYTES = 300_000
WHOLE = Range(name=NAME, limit=BYTES)


def pieces(step: int) -> Iterator[sync_pb2.Piece]:
    for at in range(0, BYTES, step):
        yield piece(bytes(min(step, BYTES - at)), size=BYTES, offset=at)


class Refusing(Liar):
    """Answers with a status."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def Fetch(self, request: sync_pb2.FetchRequest, context: Any) -> Iterator[sync_pb2.Piece]:  # noqa: N802
        context.abort(self._code, "no")
        raise AssertionError

    Metadata = Fetch


@contextlib.contextmanager
def serving(servicer: Any) -> Iterator[str]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        sync_pb2_grpc.add_SyncServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


@contextlib.contextmanager
def source(address: str, **options: Any) -> Iterator[GrpcSource]:
    with contextlib.closing(GrpcSource(address, **{"timeout_s": 20.0} | options)) as one:
        yield one


@pytest.mark.parametrize(
    ("code", "is_permanent"),
    [
        (grpc.StatusCode.UNAVAILABLE, False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, False),
        (grpc.StatusCode.UNAUTHENTICATED, False),  # a certificate may be renewed
        (grpc.StatusCode.NOT_FOUND, True),
        (grpc.StatusCode.INVALID_ARGUMENT, True),
    ],
)
def test_rollout_case_2_a_busy_service_is_told_from_one_that_will_never_have_it(
    code: grpc.StatusCode, is_permanent: bool
) -> None:
    with serving(Refusing(code)) as address, source(address) as one:
        for call in (one.fetch([WHOLE]), one.read("metadata/timestamp.json")):
            with pytest.raises(FetchError, match=code.name) as caught:
                list(call)
            assert caught.value.is_permanent is is_permanent


def test_slow_retrieval_is_given_up_by_its_name() -> None:
    stopped = threading.Event()

    def slowly() -> Iterator[sync_pb2.Piece]:
        for one in pieces(10):
            if stopped.wait(0.02):
                return
            yield one

    with serving(Liar(slowly)) as address:
        with source(address, floor_bytes_s=10_000.0, floor_window_s=0.3) as one:
            with pytest.raises(SlowSource, match="slow retrieval") as caught:
                list(one.fetch([WHOLE]))
            assert not caught.value.is_permanent
            assert caught.value.received < 10_000 * caught.value.seconds
        stopped.set()


def test_our_own_rate_limit_is_kept_and_not_taken_for_slowness() -> None:
    with serving(Liar(lambda: pieces(10_000))) as address:
        options = {"rate_bytes_s": 250_000.0, "floor_bytes_s": 1e6, "floor_window_s": 0.4}
        with source(address, **options) as one:
            started = time.monotonic()
            assert [len(data or b"") for data in one.fetch([WHOLE])] == [BYTES]
            assert time.monotonic() - started > (BYTES - (128 << 10)) / 250_000 * 0.9


def test_a_call_that_waits_is_cancelled_at_once_and_what_came_before_is_there() -> None:
    stopped = threading.Event()

    def silent_after_one() -> Iterator[sync_pb2.Piece]:
        yield next(pieces(1000))
        stopped.wait(20)

    with serving(Liar(silent_after_one)) as address, source(address) as one:
        came: list[int] = []
        started = time.monotonic()
        with pytest.raises(FetchCancelled):
            came.extend(len(part.data) for part in one.stream([WHOLE], cancelled=lambda: bool(came)))
        assert came == [1000]
        assert time.monotonic() - started < 10
        stopped.set()


def test_a_call_that_is_cancelled_before_it_begins_brings_nothing() -> None:
    with serving(Liar(lambda: pieces(1000))) as address, source(address) as one, pytest.raises(FetchCancelled):
        next(one.stream([WHOLE], cancelled=lambda: True))


@pytest.mark.parametrize("says", [b"\x00\xff" * 500, b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"])
def test_garbage_instead_of_an_answer_is_transient(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = server.accept()
                    peer.sendall(says)
                    peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with source(f"127.0.0.1:{server.getsockname()[1]}", timeout_s=5.0) as one:
            with pytest.raises(FetchError) as caught:
                list(one.fetch([WHOLE]))
            assert not caught.value.is_permanent
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_a_source_that_was_closed_says_so_and_stays_closed() -> None:
    with serving(Liar(lambda: pieces(1000))) as address, source(address) as one:
        assert list(one.fetch([WHOLE]))
        one.close()
        with pytest.raises(FetchError, match="closed"):
            list(one.fetch([WHOLE]))


def test_closing_from_another_thread_breaks_a_call_off() -> None:
    stopped = threading.Event()

    def silent() -> Iterator[sync_pb2.Piece]:
        stopped.wait(20)
        return iter(())

    with serving(Liar(silent)) as address, source(address) as one:
        timer = threading.Timer(0.2, one.close)
        timer.start()
        with pytest.raises(FetchError):
            list(one.fetch([WHOLE]))
        stopped.set()
        timer.join()


def test_pieces_are_as_small_as_was_asked_for(world: World) -> None:
    world.store.put_full("dd" * 32, bytes(20_000))
    with running(ServiceConfig(store=str(world.store.root))) as address, grpc.insecure_channel(address) as channel:
        stub, name = sync_pb2_grpc.SyncStub(channel), "objects/dd/" + "dd" * 32 + ".full"
        for asked, most in ((0, 20_000), (3000, 3000), (1, MIN_CHUNK_BYTES), (1 << 31, 20_000)):
            call = stub.Fetch(sync_pb2.FetchRequest(ranges=[sync_pb2.Range(name=name)], piece_bytes=asked))
            sizes = [len(each.data) for each in call]
            assert (max(sizes), sum(sizes)) == (most, 20_000)


def test_rollout_case_1_cuts_cost_two_percent_and_never_a_delta(tmp_path: Path) -> None:
    """3 cuts, as far from one another as 200 over 256 MB (`make soak`)."""
    result = cuts.run(megabytes=3, cuts=3, folder=tmp_path, spare_bytes=512 << 10)
    assert not result.problems
    assert result.figures["full"]["cuts"] == result.figures["delta"]["cuts"] == 3


def test_the_connection_after_a_reset_is_a_new_one(world: World) -> None:
    world.store.put_full("dd" * 32, bytes(BYTES))
    one_range = Range(name="objects/dd/" + "dd" * 32 + ".full", limit=BYTES)
    with running(ServiceConfig(store=str(world.store.root))) as address, cutter(address) as link:
        link.arm(1, 100_000, random.Random(0))
        with source(link.address) as one:
            with pytest.raises(FetchError) as caught:
                list(one.fetch([one_range]))
            assert not caught.value.is_permanent
            assert list(one.fetch([one_range])) == [bytes(BYTES)]
        assert link.connections == 2


def test_a_connection_that_went_silent_is_not_waited_for_again(world: World) -> None:
    world.store.put_full("dd" * 32, bytes(1000))
    one_range = Range(name="objects/dd/" + "dd" * 32 + ".full", limit=1000)
    with running(ServiceConfig(store=str(world.store.root))) as address, cutter(address) as link:
        with source(link.address, timeout_s=0.7) as one:
            assert list(one.fetch([one_range])) == [bytes(1000)]
            for _ in range(2):
                link.blackhole = True
                with pytest.raises(FetchError, match="DEADLINE_EXCEEDED"):
                    list(one.fetch([one_range]))
                link.blackhole = False
                assert list(one.fetch([one_range])) == [bytes(1000)]
        assert link.connections == 3


def test_reconnects_leave_nothing_behind(world: World) -> None:
    """10,000 of them, and the memory: `make soak`."""
    world.store.put_full(reconnects.ID, bytes(reconnects.BYTES))
    with running(ServiceConfig(store=str(world.store.root))) as address, cutter(address) as link:
        link.arm(20, reconnects.BYTES / 2, random.Random(0))
        with source(link.address) as one:
            assert reconnects.breaks(one, 5) == 5
            before = reconnects.held()
            assert reconnects.breaks(one, 15) == 15
            after = reconnects.held()
    assert link.connections == 20
    assert after["threads"] <= before["threads"]
    assert after["channels"] <= before["channels"] <= 1
    assert "sync-fetch" not in [thread.name for thread in threading.enumerate()]
    assert not [one for one in gc.get_objects() if type(one) is Reading]
