"""The gateway: one address for a pool of workers.

Owns composition and lifetime only: an async context that serves the protocol over what the pool's members serve. It is
ready while at least one member is.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from typing import Any

from cloud.config import CLOUD, GatewayConfig
from cloud.events import log_pool, measure_pool
from cloud.members import Members
from cloud.pool_target import PoolCatalog, PoolTarget
from common.serving.dataplane import DataPlane
from common.serving.lifetime import drain
from common.serving.policy import Only
from common.serving.router import Router
from common.telemetry.events import Hook, fan_out, ignore
from common.telemetry.logs import EventLog
from common.telemetry.metrics import Metrics
from common.transport.servers import Servers, serve

_log = logging.getLogger(__name__)


class Gateway:
    """An async context. `on_event` gets every event beside metrics and logs."""

    def __init__(self, config: GatewayConfig, *, on_event: Hook = ignore) -> None:
        self.config = config
        self.metrics = Metrics()
        events = EventLog()
        measure_pool(self.metrics)
        log_pool(events)
        on_event = fan_out(self.metrics, events, on_event)
        self.members = Members(config.workers, probe_every_s=config.probe_every_s, on_event=on_event)
        self.dataplane = DataPlane(
            name=config.name,
            router=Router([PoolTarget(self.members)], Only(CLOUD), on_event=on_event),
            catalog=PoolCatalog(self.members),
            on_event=on_event,
            is_ready=lambda: bool(self.members.pool.healthy),
        )
        self.servers: Servers
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Gateway:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.members)
            self.servers = await stack.enter_async_context(
                serve(self.dataplane, self.config.server, metrics=self.metrics.render, trusts_reason=True)
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        if not await drain(self.dataplane, self.config.drain_s):
            _log.warning("%d calls were still in progress after %g s", self.dataplane.in_flight, self.config.drain_s)
        await self._stack.aclose()

    def endpoint(self) -> dict[str, Any]:
        return self.servers.endpoint(self.config.name, "gateway")
