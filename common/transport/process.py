"""What node, worker and gateway have in common: events to metrics and logs, an ordered start, a bounded end, a command.

Each of them says in `_start` what it consists of; nothing here knows engines, pools or releases.
"""

from __future__ import annotations

import argparse
import gc
import logging
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, Self

from common.config import load_toml
from common.serving.dataplane import DataPlane
from common.serving.lifetime import drain, until_signal, write_endpoint
from common.serving.statistics import Statistics
from common.telemetry.events import Hook, fan_out, ignore
from common.telemetry.logs import EventLog, set_up
from common.telemetry.metrics import Metrics
from common.transport.servers import Servers

_log = logging.getLogger(__name__)


class ServingProcess(ABC):
    """An async context around a data plane and its servers. `on_event` gets every event beside metrics,
    logs and statistics."""

    kind: ClassVar[str]
    dataplane: DataPlane
    servers: Servers

    def __init__(self, name: str, *, drain_s: float, on_event: Hook = ignore) -> None:
        self.name, self._drain_s = name, drain_s
        self.metrics = Metrics()
        self.event_log = EventLog()
        self.statistics = Statistics()
        self.on_event = fan_out(self.metrics, self.event_log, self.statistics, on_event)
        self._stack = AsyncExitStack()

    @abstractmethod
    async def _start(self, stack: AsyncExitStack) -> None:
        """Enters into `stack` whatever the process consists of, and sets `dataplane` and `servers`."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if not await drain(self.dataplane, self._drain_s):
                _log.warning("%d calls were still in progress after %g s", self.dataplane.in_flight, self._drain_s)
        finally:
            await self._stack.aclose()

    def endpoint(self) -> dict[str, Any]:
        """What others need to know to reach this process."""
        return self.servers.endpoint(self.name, self.kind)


def run(process: Any, config: Any, args: argparse.Namespace) -> int:
    """Serves as `process(config)` until SIGTERM or SIGINT, `config` is its file's dataclass; `--check` only reads."""
    import uvloop

    options = load_toml(args.config, config)
    if args.check:
        print(f"{args.config} is sound")
        return 0
    set_up(args.log)
    uvloop.run(_serve(process(options), args.endpoint_file))
    return 0


async def _serve(process: ServingProcess, endpoint_file: Path | None) -> None:
    async with process:
        gc.collect()
        gc.freeze()  # what is loaded to start with stays: collections need not walk through it each time
        try:
            write_endpoint(endpoint_file, process.endpoint())
        except OSError as exc:
            _log.error("endpoint file %s cannot be written: %s; serving without it", endpoint_file, exc.strerror)
        await until_signal()
