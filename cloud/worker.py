"""A worker: the full-precision models on this machine's accelerator or cores, kept fresh by the parameter path.

Owns composition and lifetime only. Its stamps say `cloud` and its own name; a gateway passes both on.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from cloud.config import CLOUD, WorkerConfig
from common.serving.dataplane import DataPlane
from common.serving.lifetime import drain
from common.serving.policy import Only
from common.serving.router import Router
from common.telemetry.events import Hook, fan_out, ignore
from common.telemetry.logs import EventLog
from common.telemetry.metrics import Metrics
from common.transport.servers import Servers, serve
from hardware.serving import LocalServing
from sync.agent.agent import Agent
from sync.agent.running import running_agent
from sync.telemetry import log_sync, measure_sync

_log = logging.getLogger(__name__)


class Worker:
    """An async context. `on_event` gets every event beside metrics and logs."""

    def __init__(self, config: WorkerConfig, *, on_event: Hook = ignore) -> None:
        self.config = config
        self.metrics = Metrics()
        events = EventLog()
        measure_sync(self.metrics)
        log_sync(events)
        self._on_event = fan_out(self.metrics, events, on_event)
        self.agent: Agent | None = None
        self.dataplane: DataPlane
        self.servers: Servers
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Worker:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        if not await drain(self.dataplane, self.config.drain_s):
            _log.warning("%d calls were still in progress after %g s", self.dataplane.in_flight, self.config.drain_s)
        await self._stack.aclose()

    def endpoint(self) -> dict[str, Any]:
        return self.servers.endpoint(self.config.name, "worker")

    async def _start(self, stack: AsyncExitStack) -> None:
        config, on_event = self.config, self._on_event
        local = await stack.enter_async_context(
            LocalServing(
                CLOUD,
                config.engine_options(),
                by=config.name,
                max_queue_rows=config.max_queue_rows,
                on_event=on_event,
            )
        )
        self.dataplane = DataPlane(
            name=config.name,
            router=Router([local.target], Only(CLOUD), on_event=on_event),
            catalog=local.repository,
            on_event=on_event,
        )
        for model in config.models:
            await local.serve_bundle(Path(model.bundle), model.version)
        if config.sync is not None:
            folder = Path(config.state_dir) / "sync"
            self.agent = await stack.enter_async_context(
                running_agent(config.sync, folder, local.installer, engines=config.engines, on_event=on_event)
            )
        self.servers = await stack.enter_async_context(
            serve(self.dataplane, config.server, metrics=self.metrics.render, trusts_reason=True)
        )
