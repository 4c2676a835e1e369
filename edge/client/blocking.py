"""The client of scripts and threads: `AsyncClient` on an event loop that runs in a thread of its own.

Owns that thread. What a call means is `caller.py`'s.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy.typing as npt

from common.request import Parameter, Priority, Privacy
from common.serving.catalog import ModelMetadata, ModelStatus
from edge.client.caller import CALL_S, CLOSED, LOAD_S, Answer, AsyncClient

T = TypeVar("T")
_Opened = concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]


class Client:
    """`AsyncClient` without asyncio: the same arguments, methods and errors; any number of threads may share one.

    Usable at once; `close`, or leaving its context, ends the thread.
    """

    def __init__(self, endpoints: str | Sequence[str], *, connect_s: float = 1.0, api_key: str | None = None) -> None:
        self._client = AsyncClient(endpoints, connect_s=connect_s, api_key=api_key)
        self._lock = threading.Lock()
        self._is_closed = False
        opened: _Opened = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=_run_loop, args=(self._client, opened), name="outrider-client", daemon=True
        )
        self._thread.start()
        self._loop, self._stop = opened.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the calls in progress, too: each raises RuntimeError in its thread."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        outputs: tuple[str, ...] = (),
        classes: int = 0,
        timeout_s: float = math.inf,
        priority: Priority = Priority.INTERACTIVE,
        privacy: Privacy = Privacy.ANY,
        pin: str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> Answer:
        """One call; see `AsyncClient.infer`."""
        return self._run(
            lambda client: client.infer(
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
        )

    def ready(self, *, timeout_s: float = CALL_S) -> bool:
        return self._run(lambda client: client.ready(timeout_s=timeout_s))

    def metadata(self, model: str, version: str | None = None, *, timeout_s: float = CALL_S) -> ModelMetadata:
        return self._run(lambda client: client.metadata(model, version, timeout_s=timeout_s))

    def index(self, *, timeout_s: float = CALL_S) -> list[ModelStatus]:
        return self._run(lambda client: client.index(timeout_s=timeout_s))

    def load(self, model: str, *, timeout_s: float = LOAD_S) -> None:
        self._run(lambda client: client.load(model, timeout_s=timeout_s))

    def unload(self, model: str, *, timeout_s: float = CALL_S) -> None:
        self._run(lambda client: client.unload(model, timeout_s=timeout_s))

    def _run(self, call: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        with self._lock:  # what is handed over before `close` sets its event still runs on the loop
            if self._is_closed:
                raise RuntimeError(CLOSED)
            future = asyncio.run_coroutine_threadsafe(call(self._client), self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError(CLOSED) from None
        except BaseException:  # Ctrl-C in a caller's thread ends its call
            future.cancel()
            raise


def _run_loop(client: AsyncClient, opened: _Opened) -> None:
    try:
        with asyncio.Runner() as runner:
            runner.get_loop()  # raises where there can be no loop, before a coroutine is made that nobody awaits
            runner.run(_serve(client, opened))
    except Exception as exc:
        if opened.done():
            raise
        opened.set_exception(exc)  # no loop, say for want of file descriptors: whoever made the client is told


async def _serve(client: AsyncClient, opened: _Opened) -> None:
    stop = asyncio.Event()
    async with client:
        opened.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()
