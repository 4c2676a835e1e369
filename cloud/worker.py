"""A worker: the full-precision models on this machine's accelerator or cores, kept fresh by the parameter path.

Owns composition only. Its stamps say `cloud` and its own name; a gateway passes both on.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from cloud.config import CLOUD, WorkerConfig
from common.serving.dataplane import DataPlane
from common.serving.policy import Only
from common.serving.router import Router
from common.serving.state_folder import owned
from common.telemetry.events import Hook, ignore
from common.transport.process import ServingProcess
from common.transport.servers import serve
from hardware.serving import LocalServing
from sync.agent.agent import Agent
from sync.agent.running import running_agent
from sync.telemetry import log_sync, measure_sync


class Worker(ServingProcess):
    kind = "worker"
    local: LocalServing
    agent: Agent | None = None

    def __init__(self, config: WorkerConfig, *, on_event: Hook = ignore) -> None:
        super().__init__(config.name, drain_s=config.drain_s, on_event=on_event)
        self.config = config
        measure_sync(self.metrics)
        log_sync(self.event_log)

    async def _start(self, stack: AsyncExitStack) -> None:
        config, on_event = self.config, self.on_event
        if config.state_dir:
            stack.enter_context(owned(Path(config.state_dir), self.kind))
        self.local = await stack.enter_async_context(
            LocalServing(
                CLOUD,
                config.engine,
                by=config.name,
                max_queue_rows=config.max_queue_rows,
                on_event=on_event,
            )
        )
        self.dataplane = DataPlane(
            name=config.name,
            router=Router([self.local.target], Only(CLOUD), on_event=on_event),
            catalog=self.local.repository,
            on_event=on_event,
            timeout_s=config.server.timeout_s,
        )
        await self.local.serve_bundles(config.models)
        if config.sync is not None:
            folder = Path(config.state_dir) / "sync"
            self.agent = await stack.enter_async_context(
                running_agent(
                    config.sync,
                    folder,
                    self.local.installer,
                    name=config.name,
                    engines=config.engine.engines,
                    on_event=on_event,
                )
            )
        self.servers = await stack.enter_async_context(
            serve(
                self.dataplane,
                config.server,
                metrics=self.metrics.render,
                statistics=self.statistics,
                tenants=config.tenants,
                trusts_reason=True,
            )
        )
