"""The models that a node can speak of: its own first, then what the cloud serves for it."""

from __future__ import annotations

from common.errors import NotFound, Unavailable
from common.serving.catalog import ModelMetadata, ModelStatus
from common.serving.repository import Repository
from common.transport.grpc_client import OipClient


class NodeCatalog:
    """Load, unload and the index concern the node's own models; metadata and readiness whatever it can answer for."""

    def __init__(self, repository: Repository, cloud: OipClient | None) -> None:
        self._repository, self._cloud = repository, cloud

    async def metadata(self, model: str, version: str | None) -> ModelMetadata:
        try:
            return await self._repository.metadata(model, version)
        except (NotFound, Unavailable):
            if self._cloud is None:
                raise
        return await self._cloud.model_metadata(model, version)

    async def is_model_ready(self, model: str, version: str | None) -> bool:
        try:
            if await self._repository.is_model_ready(model, version):
                return True
        except NotFound:
            if self._cloud is None:
                raise
        return self._cloud is not None and await self._cloud.model_ready(model, version)

    async def index(self) -> list[ModelStatus]:
        return await self._repository.index()

    async def load(self, model: str) -> None:
        await self._repository.load(model)

    async def unload(self, model: str) -> None:
        await self._repository.unload(model)
