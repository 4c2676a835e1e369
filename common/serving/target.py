"""A place that can answer a request: this device, the cloud pool, a fake."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from common.request import Request, Response


class Readiness(StrEnum):
    READY = "ready"
    BUILDING = "building"  # an engine is being made
    ABSENT = "absent"  # no engine for this model


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer from a target would take now. Times in seconds; infinite where the target would refuse."""

    seconds: float = 0.0
    is_stale: bool = False  # nothing has confirmed `seconds` for a while
    queued_rows: int = 0  # with this request's own
    queue_limit: int = 0
    outside_profile: str = ""  # what about the request lies outside the declared shapes or batch; empty: nothing

    @property
    def is_full(self) -> bool:
        return 0 < self.queue_limit < self.queued_rows


class Target(Protocol):
    name: str  # edge | cloud: the word in the stamp

    async def infer(self, request: Request) -> Response: ...

    def readiness(self, model: str, version: str | None = None) -> Readiness:
        """Whether the target has an engine for the model (and for this version of it, where one is pinned)."""
        ...

    def estimate(self, request: Request) -> Estimate: ...
