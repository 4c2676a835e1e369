"""How a serving process ends: not ready at once, still answering, drained within a bound, then closed in order."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from common.config import to_json
from common.serving.dataplane import DataPlane

NOTICE_S = 0.2  # balancers get at least this long to see "not ready" before connections close
_STEP_S = 0.02


async def until_signal() -> None:
    """Returns at the first SIGTERM or SIGINT; a second one is the default action: the end."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    for number in signals:
        loop.remove_signal_handler(number)


async def drain(dataplane: DataPlane, timeout_s: float) -> bool:
    """Reports not ready, goes on answering until nothing is in flight; False where the time did not suffice."""
    dataplane.start_draining()
    loop = asyncio.get_running_loop()
    start = loop.time()
    while loop.time() < start + timeout_s:
        if dataplane.in_flight == 0 and loop.time() >= start + NOTICE_S:
            return True
        await asyncio.sleep(_STEP_S)
    return dataplane.in_flight == 0


def write_endpoint(path: Path | None, description: dict[str, Any]) -> None:
    """Tells others where this process listens, in one rename: a reader never sees half of it."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_bytes(to_json(description, indent=1) + b"\n")
    partial.replace(path)
