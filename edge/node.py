"""The node: one process that answers calls on this device, sends the rest to the cloud and keeps its models fresh.

Owns composition and lifetime only. `async with Node(config) as node` serves over the transports that the config names,
and in process through `node.infer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from common.request import Parameter, Priority, Privacy, Response
from common.serving.breaker import TargetBreakers
from common.serving.dataplane import DataPlane
from common.serving.router import Router
from common.serving.state_folder import owned
from common.serving.target import Target
from common.telemetry.events import Hook, ignore
from common.tensors import Tensors
from common.transport.grpc_client import OipClient
from common.transport.process import ServingProcess
from common.transport.servers import serve
from common.transport.tenants import read_key_file
from edge.catalog import NodeCatalog
from edge.cloud_target import CloudTarget
from edge.config import NodeConfig
from edge.disk_cache import DiskCache
from edge.in_process import checked_request
from edge.policy import EDGE, EdgeFirst
from hardware.serving import LocalServing
from sync.agent.agent import Agent
from sync.agent.running import running_agent
from sync.telemetry import log_sync, measure_sync


class Node(ServingProcess):
    kind = "edge"
    local: LocalServing
    agent: Agent | None = None

    def __init__(self, config: NodeConfig, *, on_event: Hook = ignore) -> None:
        super().__init__(config.name, drain_s=config.drain_s, on_event=on_event)
        self.config = config
        measure_sync(self.metrics)
        log_sync(self.event_log)

    async def infer(
        self,
        model: str,
        inputs: Tensors,
        *,
        outputs: tuple[str, ...] = (),
        classes: int = 0,
        timeout_s: float = math.inf,
        priority: Priority = Priority.INTERACTIVE,
        privacy: Privacy = Privacy.ANY,
        pin: str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> Response:
        """One call in process: the same path as over the wire, without the wire.

        Inputs are arrays by name, the batch first; `timeout_s` is the time left to answer. Raises the errors of
        `common.errors`.
        """
        request = checked_request(
            model,
            inputs,
            outputs=outputs,
            classes=classes,
            timeout_s=timeout_s,
            priority=priority,
            privacy=privacy,
            pin=pin,
            parameters=parameters,
        )
        return await self.dataplane.infer(request)

    async def _start(self, stack: AsyncExitStack) -> None:
        config, enter = self.config, stack.enter_async_context
        if config.state_dir:
            stack.enter_context(owned(Path(config.state_dir), self.kind))
        self.local = local = await enter(
            LocalServing(
                EDGE, config.engine, by=config.name, max_queue_rows=config.max_queue_rows, on_event=self.on_event
            )
        )
        targets: list[Target] = [local.target]
        client = None
        if config.gateway is not None:
            key = read_key_file(config.api_key_file, config.name)
            client = await enter(OipClient(config.gateway, api_key=key, is_hop=True))
            targets.append(CloudTarget(client))
        state = Path(config.state_dir)
        cache = None
        if config.cache.enabled:
            quota = config.cache.quota_bytes
            cache = await enter(
                DiskCache(state / "cache", local.repository, by=config.name, quota_bytes=quota, on_event=self.on_event)
            )
        self.dataplane = DataPlane(
            name=config.name,
            router=Router(targets, EdgeFirst(), breakers=TargetBreakers(), on_event=self.on_event),
            catalog=NodeCatalog(local.repository, client),
            cache=cache,
            on_event=self.on_event,
            is_ready=lambda: client is not None or any(map(local.repository.current, local.repository.models())),
            timeout_s=config.server.timeout_s,
        )
        await local.serve_bundles(config.models)
        if config.sync is not None:
            self.agent = await enter(
                running_agent(
                    config.sync,
                    state / "sync",
                    local.installer,
                    name=config.name,
                    engines=config.engine.engines,
                    on_event=self.on_event,
                )
            )
        self.servers = await enter(
            serve(
                self.dataplane,
                config.server,
                metrics=self.metrics.render,
                statistics=self.statistics,
                tenants=config.tenants,
            )
        )
