"""The pool as the gateway's one target, and as its catalog."""

from __future__ import annotations

import dataclasses
import math
from itertools import count

from msgspec import structs

from cloud.config import CLOUD
from cloud.members import Members
from common.errors import InvalidInput, Unavailable
from common.request import Privacy, Request, Response
from common.serving.catalog import ModelMetadata, ModelStatus, versions_of
from common.serving.target import Estimate, Readiness
from common.transport.grpc_client import OipClient
from common.transport.headers import PRIVACY


class PoolTarget:
    name = CLOUD

    def __init__(self, members: Members) -> None:
        self._members = members

    async def infer(self, request: Request) -> Response:
        """A worker's answer. Raises what the worker said, or `Unavailable` when none can be had."""
        if request.context.privacy is Privacy.DEVICE_ONLY:
            raise InvalidInput(PRIVACY, "a device_only request has left its device", "any, or a call to the edge node")
        context, attempts = request.context, count(request.context.attempt + 1)

        async def ask(client: OipClient) -> Response:
            counted = structs.replace(context, attempt=next(attempts))
            return await client.infer(structs.replace(request, context=counted))

        return await self._members.call(request.model, context.pin, ask, context.priority)

    def readiness(self, model: str, version: str | None = None) -> Readiness:
        is_served = any(member.serves(model, version) for member in self._members.pool.healthy)
        return Readiness.READY if is_served else Readiness.ABSENT

    def estimate(self, request: Request) -> Estimate:
        return Estimate()


class PoolCatalog:
    """What the healthy members serve, taken together; load and unload reach all of them."""

    def __init__(self, members: Members) -> None:
        self._members = members

    async def metadata(self, model: str, version: str | None) -> ModelMetadata:
        metadata = await self._members.call(model, version, lambda client: client.model_metadata(model, version))
        versions = (version,) if version else versions_of(self._members.pool.index(), model)
        return dataclasses.replace(metadata, versions=versions)

    async def is_model_ready(self, model: str, version: str | None) -> bool:
        try:
            self._members.pool.pick(model, version, now=math.inf)  # a pause is no state of the model
        except Unavailable:
            return False
        return True

    async def index(self) -> list[ModelStatus]:
        return self._members.pool.index()

    async def load(self, model: str) -> None:
        await self._members.on_all(lambda client: client.load(model))

    async def unload(self, model: str) -> None:
        await self._members.on_all(lambda client: client.unload(model))
