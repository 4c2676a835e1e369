"""Threads for what would hold an event loop up: reading and writing large messages.

Two, however many calls wait: the work is Python's own, so that more of them would only take the loop's turns away. A
caller that goes away while its message waits for its turn costs nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="outrider-messages")


async def off_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `function` returns or raises; the loop goes on meanwhile."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(function, *args, **kwargs))
