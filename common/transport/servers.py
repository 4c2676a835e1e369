"""The servers of a process, as its configuration file names them: HTTP and gRPC, TCP and Unix sockets."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.loopback import is_loopback
from common.serving.dataplane import DataPlane
from common.serving.statistics import Statistics
from common.transport.grpc_server import serve_grpc
from common.transport.http_server import serve_http
from common.transport.listen import Listening
from common.transport.tenants import TenantOptions, check_tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The `[server]` table: where a process listens. No port: not there. Port 0: any free one."""

    host: str = "127.0.0.1"  # address to bind; only loopback keeps other machines out
    http_port: int | None = None  # 0..65535: HTTP over TCP; 0: any free port
    grpc_port: int | None = None  # 0..65535: gRPC over TCP; 0: any free port
    http_uds: str | None = None  # path of a Unix socket for HTTP
    grpc_uds: str | None = None  # path of a Unix socket for gRPC
    timeout_s: float = math.inf  # 0.001..: longest that a call may take; of this and the deadline the less

    def __post_init__(self) -> None:
        for name, port in (("http_port", self.http_port), ("grpc_port", self.grpc_port)):
            if port is not None and not 0 <= port <= 65535:
                raise ValueError(f"{name} must be 0..65535, got {port}")
        if not self.timeout_s >= 0.001:
            raise ValueError(f"timeout_s must be at least 0.001, got {self.timeout_s}")


def check_exposure(server: ServerOptions, tenants: Sequence[TenantOptions]) -> None:
    """Raises ValueError where other machines could call without a key, or where tenants contradict each other."""
    check_tenants(tenants)
    is_open = server.http_port is not None or server.grpc_port is not None
    if is_open and not tenants and not is_loopback(server.host):
        raise ValueError(
            f"server.host is {server.host!r}, where other machines can call, and no API keys are configured; accepted: "
            "a loopback address (127.0.0.1, ::1, localhost), Unix sockets alone, or [[tenants]] with the hashes of "
            "keys (`outrider keys new`)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """What is up; None where the configuration names neither port nor socket."""

    http: Listening | None
    grpc: Listening | None

    def endpoint(self, name: str, kind: str) -> dict[str, Any]:
        """What others need to know to reach this process."""
        return {
            "name": name,
            "kind": kind,
            "pid": os.getpid(),
            "http": self.http.addresses[0] if self.http else None,
            "grpc": self.grpc.addresses[0] if self.grpc else None,
        }


@contextlib.asynccontextmanager
async def serve(
    dataplane: DataPlane,
    options: ServerOptions,
    *,
    metrics: Callable[[], bytes],
    statistics: Statistics | None = None,
    tenants: Sequence[TenantOptions] = (),
    trusts_reason: bool = False,
) -> AsyncIterator[Servers]:
    """Serves until the context is left. Raises `ConfigError` when an address cannot be had.

    `statistics`: a hook that hears the data plane's events; None: that extension is refused.
    `tenants`: whose keys are good; without any there is one tenant. `trusts_reason`: gRPC callers that need no key are
    our own processes, whose word counts on a call's tenant and on why it left the edge.
    """
    http = grpc = None
    async with contextlib.AsyncExitStack() as stack:
        if options.http_port is not None or options.http_uds is not None:
            uds = Path(options.http_uds) if options.http_uds else None
            http = await stack.enter_async_context(
                serve_http(
                    dataplane,
                    host=options.host,
                    port=options.http_port,
                    uds=uds,
                    metrics=metrics,
                    statistics=statistics,
                    tenants=tenants,
                )
            )
        if options.grpc_port is not None or options.grpc_uds is not None:
            uds = Path(options.grpc_uds) if options.grpc_uds else None
            grpc = await stack.enter_async_context(
                serve_grpc(
                    dataplane,
                    host=options.host,
                    port=options.grpc_port,
                    uds=uds,
                    statistics=statistics,
                    tenants=tenants,
                    trusts_reason=trusts_reason,
                )
            )
        yield Servers(http=http, grpc=grpc)
