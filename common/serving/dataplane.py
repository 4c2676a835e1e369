"""The data plane: one call in, one stamped answer out. Every transport calls this and nothing below it.

Owns the order of things for one call: cache, router (for identical calls once), cache again, event. Leaves parsing and
rendering to `common/transport`, the choice of a target to the router's policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from msgspec import structs

from common.clock import Clock, SystemClock
from common.errors import InvalidInput, Unavailable
from common.request import Context, Request, Response, Stamp
from common.serving.answer_cache import AnswerCache, NoCache
from common.serving.catalog import Catalog
from common.serving.flights import Flights, Led, unchanging
from common.serving.router import Router
from common.telemetry.events import Hook, RequestDone, ignore


class DataPlane:
    """`name` is the process's own name in stamps and metadata; `is_ready` says whether it takes new calls.

    `timeout_s`: the longest that a call may take. Of that and the caller's deadline the earlier counts.
    """

    def __init__(
        self,
        *,
        name: str,
        router: Router,
        catalog: Catalog,
        cache: AnswerCache | None = None,
        on_event: Hook = ignore,
        clock: Clock | None = None,
        is_ready: Callable[[], bool] = lambda: True,
        timeout_s: float = math.inf,
    ) -> None:
        self.name = name
        self.catalog = catalog
        self._router = router
        self._cache = cache or NoCache()
        self._on_event = on_event
        self._monotonic = (clock or SystemClock()).monotonic
        self._is_ready = is_ready
        self._timeout_s = timeout_s
        self._is_draining = False
        self._flights = Flights(by=name, monotonic=self._monotonic)
        self.in_flight = 0

    async def infer(self, request: Request) -> Response:
        """Answers one call. Raises the errors of `common.errors`; every end is one `RequestDone` event."""
        start = self._monotonic()
        self.in_flight += 1
        if request.context.deadline > (latest := start + self._timeout_s):
            request = structs.replace(request, context=structs.replace(request.context, deadline=latest))
        try:
            if not request.inputs:
                raise InvalidInput("inputs", "the request has none", "at least one input tensor")
            found = await self._cache.lookup(request)
            response = found.response
            if response is None and found.key is None:
                response = await self._router.infer(request)
            elif response is None:
                response = await self._flights.answer(request, found, partial(self._lead, request, found.digest))
        except BaseException as exc:
            none = Stamp(target="", model=request.model, version="")
            self._report(request.context, none, start, type(exc).__name__)
            raise
        finally:
            self.in_flight -= 1
        self._report(request.context, response.stamp, start, "")
        return response

    async def _lead(self, request: Request, digest: bytes | None) -> Led:
        response = unchanging(await self._router.infer(request))
        return response, self._cache.store(request, response, digest)

    def is_ready(self) -> bool:
        """False from the moment that draining starts: balancers look elsewhere, calls are still answered."""
        return not self._is_draining and self._is_ready()

    def start_draining(self) -> None:
        self._is_draining = True

    async def load(self, model: str) -> None:
        if self._is_draining:
            raise Unavailable(f"{self.name} is shutting down")
        await self.catalog.load(model)

    def _report(self, context: Context, stamp: Stamp, start: float, error: str) -> None:
        self._on_event(
            RequestDone(
                request_id=context.id,
                model=stamp.model,
                version=stamp.version,
                target=stamp.target,
                reason=stamp.reason,
                priority=context.priority,
                seconds=self._monotonic() - start,
                error=error,
            )
        )
