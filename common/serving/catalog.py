"""What models a process can speak of: the seam between the data plane and where they are (here, or behind a pool)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from common.tensors import TensorSpec


class ModelState(StrEnum):
    """The states of the protocol's repository index, and BUILDING: an engine is being made."""

    READY = "READY"
    BUILDING = "BUILDING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    name: str
    version: str
    state: ModelState
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetadata:
    name: str
    versions: tuple[str, ...]
    platform: str  # engine and variant, for example onnxruntime_cpu-int8
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int = 0  # the most rows of one batch; 0: not known


def versions_of(statuses: Iterable[ModelStatus], model: str) -> tuple[str, ...]:
    """The ready versions of one model in an index."""
    return tuple(s.version for s in statuses if s.name == model and s.state is ModelState.READY)


class Catalog(Protocol):
    """Every method raises `ModelNotFound` or `VersionNotFound` for what is not known."""

    async def metadata(self, model: str, version: str | None) -> ModelMetadata: ...

    async def is_model_ready(self, model: str, version: str | None) -> bool: ...

    async def index(self) -> list[ModelStatus]: ...

    async def load(self, model: str) -> None: ...

    async def unload(self, model: str) -> None: ...
