"""Things that happen again and again until somebody says that it is over."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator


async def ticks(every_s: float, over: asyncio.Event) -> AsyncIterator[int]:
    """0 now, then the next number each `every_s` seconds; what the body takes does not shift the pace."""
    start, number = time.monotonic(), 0
    while not over.is_set():
        yield number
        number += 1
        await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, start + number * every_s - time.monotonic())):
                await over.wait()
