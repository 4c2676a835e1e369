"""Unix sockets of HTTP and gRPC: a living process keeps its own, a dead one's is replaced, nobody removes another's."""

from __future__ import annotations

import socket
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.transport.grpc_server import serve_grpc
from common.transport.http_server import serve_http
from common.transport.listen import Listening
from tests.common.transport.fakes import FakeTarget, plane


def serving(kind: str, uds: Path) -> AbstractAsyncContextManager[Listening]:
    if kind == "http":
        return serve_http(plane(FakeTarget()), port=None, uds=uds)
    return serve_grpc(plane(FakeTarget()), port=None, uds=uds)


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(5)
        return caller.connect_ex(str(path)) == 0


kinds = pytest.mark.parametrize("kind", ["http", "grpc"])


@kinds
@pytest.mark.parametrize("second", ["http", "grpc"])
async def test_a_living_processs_socket_is_not_taken(tmp_path: Path, kind: str, second: str) -> None:
    uds = tmp_path / "s"
    async with serving(kind, uds):
        with pytest.raises(ConfigError, match=f"^{second}: {uds}: cannot listen: another process listens there"):
            async with serving(second, uds):
                pass
        assert answers(uds)
        assert list(tmp_path.iterdir()) == [uds]
    assert list(tmp_path.iterdir()) == []


@kinds
async def test_a_dead_processs_socket_is_replaced(tmp_path: Path, kind: str) -> None:
    uds = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(uds))
    assert not answers(uds)
    async with serving(kind, uds):
        assert answers(uds)
    assert list(tmp_path.iterdir()) == []


@kinds
async def test_a_socket_that_is_anothers_by_now_is_left(tmp_path: Path, kind: str) -> None:
    uds = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        async with serving(kind, uds):
            uds.unlink()
            other.bind(str(uds))
            other.listen()
        assert answers(uds)


@kinds
async def test_a_file_that_is_no_socket_is_left(tmp_path: Path, kind: str) -> None:
    uds = tmp_path / "s"
    uds.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"^{kind}: {uds}: cannot listen: File exists"):
        async with serving(kind, uds):
            pass
    assert uds.read_text(encoding="utf-8") == "mine"
    assert list(tmp_path.iterdir()) == [uds]


@kinds
async def test_a_folder_that_is_not_there_is_said_by_its_own_name(tmp_path: Path, kind: str) -> None:
    uds = tmp_path / "missing" / "s"
    with pytest.raises(ConfigError, match=f"{uds}: cannot listen: No such file or directory"):
        async with serving(kind, uds):
            pass
