"""Nodes that give slabs to one another."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import FetchCancelled
from sync.agent.client import GrpcSource
from sync.agent.fetch import Assembly, Fetched
from sync.agent.local import LocalSlabs, verify_files
from sync.agent.peer_service import MAX_RANGES, peer_service
from sync.agent.peers import LEFT_ALONE_S, Peers, raw_name
from sync.agent.ports import Range
from sync.proto import sync_pb2
from tests.sync.agent.test_bad_link import serving
from tests.sync.agent.test_client import Liar
from tests.sync.agent.test_fetch import Known, damage, installed, release
from tests.sync.fakes import World, weights

LOOPBACK = "127.0.0.1:0"


@pytest.fixture
def known(world: World, tmp_path: Path) -> Known:
    """What a neighbour has."""
    world.publish(weights())
    return installed(world, tmp_path, "1")


@contextlib.contextmanager
def peers(*addresses: str, **options: Any) -> Iterator[Peers]:
    with contextlib.closing(Peers(addresses, **options)) as one:
        yield one


def fetched(world: World, folder: Path, one: Peers) -> Fetched:
    folder.mkdir()
    result = Fetched()
    Assembly(release(world), folder, LocalSlabs(()), peers=one).run(world.source, result)
    assert verify_files(release(world), folder) is None
    return result


def test_what_a_neighbour_has_is_not_asked_of_the_source(world: World, tmp_path: Path, known: Known) -> None:
    with peer_service(LOOPBACK, lambda: known) as address, peers(address) as one:
        result = fetched(world, tmp_path / "out", one)
    assert set(result.bytes_by_form) == {"peer"}
    assert world.source.fetched == world.source.indexes == []


def test_a_neighbour_without_the_release_costs_one_question(world: World, tmp_path: Path, known: Known) -> None:
    with peer_service(LOOPBACK, list) as address, peers(address) as one:
        result = fetched(world, tmp_path / "out", one)
    assert set(result.bytes_by_form) == {"full"}


def test_what_is_damaged_on_the_neighbours_disk_is_not_given_away(world: World, tmp_path: Path, known: Known) -> None:
    damage(known[0][1] / "full/model.safetensors", -1)
    with peer_service(LOOPBACK, lambda: known) as address, peers(address) as one:
        result = fetched(world, tmp_path / "out", one)
    assert set(result.bytes_by_form) == {"peer", "full"}
    assert len(world.source.fetched) == 1


def test_rollout_case_28_a_dead_neighbour_costs_200_ms_once_a_minute(world: World, tmp_path: Path) -> None:
    """It takes the connection and says nothing, which is what costs 30 s elsewhere."""
    world.publish(weights())
    now = [1000.0]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with peers(address, monotonic=lambda: now[0]) as one:
            slabs = list(release(world).manifest.slabs().values())
            started = time.monotonic()
            assert list(one.fetch(slabs)) == []
            took = time.monotonic() - started
            assert 0.2 <= took < 5
            started = time.monotonic()
            assert [list(one.fetch(slabs)) for _ in range(50)] == [[]] * 50
            assert time.monotonic() - started < took  # nobody was dialled
            fetched(world, tmp_path / "out", one)
            now[0] += LEFT_ALONE_S
            started = time.monotonic()
            assert list(one.fetch(slabs)) == []
            assert time.monotonic() - started >= 0.2


def test_a_lying_neighbour_is_left_alone_and_the_source_has_the_truth(world: World, tmp_path: Path) -> None:
    world.publish(weights())
    asked: list[int] = []

    class Lying(Liar):
        def __init__(self) -> None:
            pass

        def Fetch(  # noqa: N802
            self, request: sync_pb2.FetchRequest, context: Any
        ) -> Iterator[sync_pb2.Piece]:
            asked.append(len(request.ranges))
            for number, each in enumerate(request.ranges):
                data = b"\x01" * each.length
                yield sync_pb2.Piece(range=number, file_bytes=len(data), offset=0, data=data)

    with serving(Lying()) as address, peers(address) as one:
        result = fetched(world, tmp_path / "out", one)
        assert set(result.bytes_by_form) == {"full"}
        fetched(world, tmp_path / "again", one)
    assert len(asked) == 1


def test_asking_neighbours_is_cancelled_like_everything(world: World, known: Known) -> None:
    slabs = list(release(world).manifest.slabs().values())
    with peer_service(LOOPBACK, lambda: known) as address, peers(address) as one, pytest.raises(FetchCancelled):
        list(one.fetch(slabs, lambda: True))


def test_a_neighbour_gives_slabs_by_their_id_and_nothing_else(world: World, known: Known) -> None:
    slab = next(iter(release(world).manifest.slabs().values()))
    names = [f"objects/{slab.id[:2]}/{slab.id}.full", "slabs/../bundle.json", "bundle.json", slab.id, "slabs/"]
    with (
        peer_service(LOOPBACK, lambda: known) as address,
        contextlib.closing(GrpcSource(address, timeout_s=10)) as one,
    ):
        assert list(one.fetch([Range(name=name, limit=1 << 20) for name in names])) == [None] * len(names)
        raw = next(one.fetch([Range(name=raw_name(slab.id), limit=1 << 20)]))
        assert raw is not None
        assert len(raw) == slab.length
        parts = [Range(name=raw_name(slab.id), offset=1, length=3), Range(name=raw_name(slab.id), offset=9, length=2)]
        assert list(one.fetch(parts)) == [raw[1:4], raw[9:11]]
        too_much = [Range(name=f"slabs/{number}", length=1) for number in range(MAX_RANGES + 1)]
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            list(one.fetch(too_much))
