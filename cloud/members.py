"""The pool's connections: one client per worker, probed every second, and the call that moves on once when one breaks.

Owns clients, probes and the count of calls in flight. Leaves the choice of a member to `pool.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

from cloud.events import HealthChanged, Redispatched
from cloud.pool import MAX_MISSED, Member, Pool
from common.errors import DeadlineExceeded, NotFound, OutriderError, TargetUnreachable, Unavailable
from common.request import Priority
from common.telemetry.events import Hook, ignore
from common.transport.grpc_client import OipClient

T = TypeVar("T")
Use = Callable[[OipClient], Awaitable[T]]

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 1.0


class Members:
    """An async context: probes every member once before it is entered, and each second while it is open."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        probe_every_s: float = PROBE_EVERY_S,
        api_key: str = "",
        on_event: Hook = ignore,
    ) -> None:
        self.pool = Pool(tuple(Member(address=address) for address in addresses))
        self._probe_every_s, self._api_key, self._on_event = probe_every_s, api_key, on_event
        self._clients: dict[Member, OipClient] = {}
        self._stack = AsyncExitStack()
        self._watchers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Members:
        for member in self.pool.members:
            client = OipClient(member.address, api_key=self._api_key, is_hop=True)
            self._clients[member] = await self._stack.enter_async_context(client)
        await self.probe()
        for member in self.pool.members:
            watcher = asyncio.create_task(self._watch(member), name=f"probe-{member.address}")
            self._watchers.append(watcher)
        return self

    async def __aexit__(self, *_: object) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self._stack.aclose()

    async def call(self, model: str, version: str | None, use: Use[T], priority: Priority = Priority.INTERACTIVE) -> T:
        """Runs `use` on a member that serves the model; once more on another one when the first gave no answer.

        That is when the connection broke, or when the member no longer has what it had at the last probe. Any other
        error is the answer. A member that says when to come back is not called before, for that model and class.
        """
        member = self.pool.pick(model, version, time.monotonic(), priority=priority)
        try:
            return await self._asked(member, model, priority, use)
        except TargetUnreachable as exc:
            self.pool.broke(member, time.monotonic())
            problem: OutriderError = exc
        except NotFound as exc:
            problem = exc
        try:
            other = self.pool.pick(model, version, time.monotonic(), priority=priority, avoid=(member,))
        except (NotFound, Unavailable):
            raise problem from None
        self._on_event(Redispatched(model=model, member=member.address, problem=str(problem)))
        try:
            return await self._asked(other, model, priority, use)
        except TargetUnreachable:
            self.pool.broke(other, time.monotonic())
            raise

    async def on_all(self, use: Use[None]) -> None:
        """Runs `use` on every healthy member. Raises the first failure; `NotFound` only where no member knows of it."""
        members = self.pool.healthy
        if not members:
            raise Unavailable("no worker of the cloud pool is healthy")
        results = await asyncio.gather(*(self._on(member, use) for member in members), return_exceptions=True)
        await self.probe()
        failures = [result for result in results if isinstance(result, BaseException)]
        serious = [failure for failure in failures if not isinstance(failure, NotFound)]
        if serious or len(failures) == len(members):
            raise (serious or failures)[0]

    async def probe(self) -> None:
        """Asks every member how it is and what it serves."""
        await asyncio.gather(*(self._probe(member) for member in self.pool.members))

    async def _asked(self, member: Member, model: str, priority: Priority, use: Use[T]) -> T:
        try:
            return await self._on(member, use)
        except Unavailable as exc:
            if not isinstance(exc, TargetUnreachable):
                self.pool.refused(member, model, priority, exc, time.monotonic())
            raise

    async def _on(self, member: Member, use: Use[T]) -> T:
        member.in_flight += 1
        try:
            return await use(self._clients[member])
        finally:
            member.in_flight -= 1

    async def _watch(self, member: Member) -> None:
        while True:
            await asyncio.sleep(self._probe_every_s)
            await self._probe(member)

    async def _probe(self, member: Member) -> None:
        client, pool = self._clients[member], self.pool
        problem = "not ready"
        try:
            is_ready = await client.server_ready(timeout_s=PROBE_TIMEOUT_S)
            index = await client.index(timeout_s=PROBE_TIMEOUT_S) if is_ready else []
            changed = pool.observed(member, is_ready=is_ready, index=index)
        except DeadlineExceeded:
            changed, problem = pool.missed(member), f"{MAX_MISSED} probes without an answer"
        except OutriderError as exc:
            changed, problem = pool.observed(member, is_ready=False), str(exc)
        if changed:
            said = "" if member.is_healthy else problem
            self._on_event(HealthChanged(member=member.address, is_healthy=member.is_healthy, problem=said))
