"""The cloud as a target of the node's router: the gateway, over OIP gRPC."""

from __future__ import annotations

from msgspec import structs

from common.errors import TargetUnreachable
from common.request import Privacy, Request, Response
from common.serving.target import Estimate, Readiness
from common.transport.grpc_client import OipClient
from edge.policy import CLOUD


class CloudTarget:
    name = CLOUD

    def __init__(self, client: OipClient) -> None:
        self._client = client

    async def infer(self, request: Request) -> Response:
        if request.context.privacy is Privacy.DEVICE_ONLY:  # the policy never plans this; fail closed if one does
            raise TargetUnreachable(self.name, "the request must not leave the device")
        context = structs.replace(request.context, attempt=request.context.attempt + 1)
        return await self._client.infer(structs.replace(request, context=context))

    def readiness(self, model: str, version: str | None = None) -> Readiness:
        return Readiness.READY  # only the gateway knows; it says so in its answer

    def estimate(self, request: Request) -> Estimate:
        return Estimate()
