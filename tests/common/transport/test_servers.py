"""The servers that a configuration names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.transport.grpc_client import OipClient
from common.transport.servers import ServerOptions, serve
from tests.common.transport.fakes import FakeTarget, plane


async def test_only_what_is_named_is_up(tmp_path: Path) -> None:
    uds = tmp_path / "grpc.sock"
    async with serve(plane(FakeTarget()), ServerOptions(grpc_uds=str(uds)), metrics=bytes) as servers:
        assert servers.http is None
        assert servers.endpoint("node-a", "edge") == {
            "name": "node-a",
            "kind": "edge",
            "pid": os.getpid(),
            "http": None,
            "grpc": f"unix:{uds}",
        }
        async with OipClient(f"unix:{uds}") as client:
            assert await client.server_ready()


async def test_both_listen_on_free_ports_and_sockets(tmp_path: Path) -> None:
    options = ServerOptions(http_port=0, grpc_port=0, http_uds=str(tmp_path / "http.sock"))
    async with serve(plane(FakeTarget()), options, metrics=bytes) as servers:
        assert servers.http is not None
        assert servers.grpc is not None
        assert servers.http.port != servers.grpc.port
        assert servers.http.addresses == (f"http://127.0.0.1:{servers.http.port}", f"http+unix://{options.http_uds}")
    assert not (tmp_path / "http.sock").exists()


@pytest.mark.parametrize(
    "options", [ServerOptions(http_uds="/no/such/folder/s"), ServerOptions(grpc_uds="/no/such/folder/s")]
)
async def test_a_socket_that_cannot_be_made_is_a_config_error(options: ServerOptions) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        async with serve(plane(FakeTarget()), options, metrics=bytes):
            pass


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="grpc_port"):
        ServerOptions(grpc_port=port)
