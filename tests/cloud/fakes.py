"""Workers as the gateway sees them: real servers on real ports over the transports' fakes."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.serving.catalog import ModelState
from common.transport.grpc_server import serve_grpc
from tests.common.transport.fakes import FakeCatalog, FakeTarget, plane


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class FakeWorker:
    address: str
    target: FakeTarget
    catalog: FakeCatalog

    @property
    def calls(self) -> int:
        return len(self.target.requests)


@asynccontextmanager
async def fake_worker(name: str, port: int = 0, version: str = "3", drain_s: float = 0.0) -> AsyncIterator[FakeWorker]:
    target = FakeTarget(name="cloud", by=name, version=version)
    catalog = FakeCatalog(version)
    for model in ("slow", "full"):
        catalog.states[model] = ModelState.READY
    async with serve_grpc(plane(target, catalog, name), port=port, trusts_reason=True, drain_s=drain_s) as server:
        yield FakeWorker(server.addresses[0], target, catalog)


async def _serve_until_killed(name: str, port: int) -> None:
    async with fake_worker(name, port):
        print("serving", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":  # a worker in a process of its own, for tests that kill it
    asyncio.run(_serve_until_killed(sys.argv[1], int(sys.argv[2])))
