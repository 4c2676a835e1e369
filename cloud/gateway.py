"""The gateway: one address for a pool of workers.

Owns composition only: the protocol over what the pool's members serve. It is ready while at least one member is.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from cloud.config import CLOUD, GatewayConfig
from cloud.events import log_pool, measure_pool
from cloud.members import Members
from cloud.pool_target import PoolCatalog, PoolTarget
from common.serving.dataplane import DataPlane
from common.serving.policy import Only
from common.serving.router import Router
from common.telemetry.events import Hook, ignore
from common.transport.process import ServingProcess
from common.transport.servers import serve
from common.transport.tenants import read_key_file


class Gateway(ServingProcess):
    kind = "gateway"

    def __init__(self, config: GatewayConfig, *, on_event: Hook = ignore) -> None:
        super().__init__(config.name, drain_s=config.drain_s, on_event=on_event)
        self.config = config
        measure_pool(self.metrics)
        log_pool(self.event_log)
        self.members = Members(
            config.workers,
            probe_every_s=config.probe_every_s,
            api_key=read_key_file(config.api_key_file, config.name),
            on_event=self.on_event,
        )
        self.dataplane = DataPlane(
            name=config.name,
            router=Router([PoolTarget(self.members)], Only(CLOUD), on_event=self.on_event),
            catalog=PoolCatalog(self.members),
            on_event=self.on_event,
            is_ready=lambda: bool(self.members.pool.healthy),
            timeout_s=config.server.timeout_s,
        )

    async def _start(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self.members)
        self.servers = await stack.enter_async_context(
            serve(
                self.dataplane,
                self.config.server,
                metrics=self.metrics.render,
                statistics=self.statistics,
                tenants=self.config.tenants,
                trusts_reason=True,
            )
        )
