"""The servers that a configuration names."""

from __future__ import annotations

import os
from pathlib import Path

import aiohttp
import grpc
import pytest

from common.errors import ConfigError
from common.serving.statistics import Statistics
from common.telemetry.events import BatchDone
from common.transport import oip_grpc
from common.transport.grpc_client import OipClient
from common.transport.proto import oip_pb2 as pb
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


async def test_both_give_the_same_statistics() -> None:
    statistics = Statistics()
    statistics(BatchDone(model="echo", rows=3, items=1, seconds=0.5))
    options = ServerOptions(http_port=0, grpc_port=0)
    async with serve(plane(FakeTarget()), options, metrics=bytes, statistics=statistics) as servers:
        assert servers.http is not None
        assert servers.grpc is not None
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{servers.http.addresses[0]}/v2/models/echo/stats") as reply,
        ):
            [over_http] = (await reply.json())["model_stats"]
        async with grpc.aio.insecure_channel(servers.grpc.addresses[0]) as channel:
            call = channel.unary_unary(f"/{oip_grpc.SERVICE}/ModelStatistics")
            [over_grpc] = pb.ModelStatisticsResponse.FromString(
                await call(pb.ModelStatisticsRequest(name="echo").SerializeToString())
            ).model_stats
    assert over_http["inference_count"] == 3
    assert pb.ModelStatistics(**over_http) == over_grpc


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
