"""One execution for identical requests at the same time: the first is led to a target, the others wait for its answer.

Rules: a follower keeps its own deadline and may leave; a leader that leaves, or whose time is too short, takes nobody
with it: a follower takes its place. A failure that would be every follower's as well is handed to all of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from msgspec import structs

from common.errors import DeadlineExceeded, Forbidden, InvalidRequest, NotFound
from common.request import Priority, Privacy, Request, Response
from common.serving.answer_cache import CACHE, Lookup

_Key = tuple[str, str | None, Priority, Privacy]

# A leader's answer, and a future that is done when the cache shows it to every look-up to come (None: at once).
Led = tuple[Response, asyncio.Future[None] | None]


@dataclass(slots=True, kw_only=True, eq=False)
class _Flight:
    deadline: float
    landed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    response: Response | None = None
    failure: Exception | None = None


class Flights:
    """`by` names the process in the stamps of shared answers."""

    def __init__(self, *, by: str, monotonic: Callable[[], float]) -> None:
        self._by, self._monotonic = by, monotonic
        self._flights: dict[_Key, _Flight] = {}

    async def answer(self, request: Request, found: Lookup, lead: Callable[[], Awaitable[Led]]) -> Response:
        """The answer to a request that the cache does not have. Identical means: the same key, and the same pin,
        class and privacy, since these say who may answer and how soon. Raises what `lead` raises."""
        context = request.context
        if found.key is None:
            return (await lead())[0]
        key = (found.key, context.pin, context.priority, context.privacy)
        while (flight := self._flights.get(key)) is not None:
            await self._wait(flight, request)
            if flight.response is not None:
                if not _is_what_was_asked(flight.response, request, found):
                    return (await lead())[0]
                stamp = structs.replace(flight.response.stamp, target=CACHE, by=self._by, reason=None)
                return structs.replace(flight.response, stamp=stamp)
            if flight.failure is not None and self._is_everyones(flight.failure, flight.deadline, context.deadline):
                raise flight.failure.with_traceback(None)
        return await self._lead(key, request, lead)

    async def _lead(self, key: _Key, request: Request, lead: Callable[[], Awaitable[Led]]) -> Response:
        flight = self._flights[key] = _Flight(deadline=request.context.deadline)
        kept: asyncio.Future[None] | None = None
        try:
            response, kept = await lead()
            flight.response = response
        except Exception as exc:
            flight.failure = exc
            raise
        finally:
            flight.landed.set_result(None)
            if kept is None:
                del self._flights[key]
            else:  # a look-up that came before the answer was kept has missed it, and finds it here
                kept.add_done_callback(lambda _done: self._flights.pop(key))
        return response

    async def _wait(self, flight: _Flight, request: Request) -> None:
        deadline = request.context.deadline
        remaining_s = None if math.isinf(deadline) else max(0.0, deadline - self._monotonic())
        try:
            async with asyncio.timeout(remaining_s):
                await asyncio.shield(flight.landed)
        except TimeoutError:
            raise DeadlineExceeded(request.model, "waiting for the answer to an identical call") from None

    def _is_everyones(self, failure: Exception, leaders: float, own: float) -> bool:
        """Not where the leader's time was the reason, or may have been: it had less than half of what is left here."""
        if isinstance(failure, InvalidRequest | NotFound | Forbidden):
            return True
        now = self._monotonic()
        return leaders == own or own - now <= 2 * (leaders - now)


def _is_what_was_asked(response: Response, request: Request, found: Lookup) -> bool:
    """What the cache would keep under the key: an answer of another model or version is its own caller's alone."""
    return (response.stamp.model, response.stamp.version) == (request.model, found.version)


def unchanging(response: Response) -> Response:
    """A copy whose outputs nobody can change, since several callers and the cache will hold it."""
    outputs = {name: array.copy() for name, array in response.outputs.items()}
    for array in outputs.values():
        array.flags.writeable = False
    return structs.replace(response, outputs=outputs)
