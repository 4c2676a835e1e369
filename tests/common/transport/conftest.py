from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.serving.dataplane import DataPlane
from common.serving.statistics import Statistics
from common.transport.grpc_server import serve_grpc
from common.transport.http_server import serve_http
from tests.common.transport.fakes import FakeCatalog, FakeTarget, plane


@dataclass(frozen=True)
class Served:
    target: FakeTarget
    catalog: FakeCatalog
    dataplane: DataPlane
    statistics: Statistics
    http: str  # host:port
    grpc: str
    uds: Path  # HTTP
    grpc_uds: str


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A data plane over fakes, behind real servers on free ports and Unix sockets."""
    target, catalog = FakeTarget(), FakeCatalog()
    statistics = Statistics()
    dataplane = plane(target, catalog, on_event=statistics)
    uds = tmp_path / "http.sock"
    async with (
        serve_http(dataplane, uds=uds, metrics=lambda: b"outrider_up 1\n", statistics=statistics, drain_s=1.0) as http,
        serve_grpc(
            dataplane, uds=tmp_path / "grpc.sock", statistics=statistics, trusts_reason=True, drain_s=1.0
        ) as grpc,
    ):
        yield Served(
            target=target,
            statistics=statistics,
            catalog=catalog,
            dataplane=dataplane,
            http=f"127.0.0.1:{http.port}",
            grpc=f"127.0.0.1:{grpc.port}",
            uds=uds,
            grpc_uds=grpc.addresses[1],
        )
