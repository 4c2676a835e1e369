"""A data plane over a fake target and a fake catalog, for the transports' tests."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from common.errors import (
    DeadlineExceeded,
    EngineError,
    ModelNotFound,
    OutsideProfile,
    Overloaded,
    Unavailable,
    VersionNotFound,
)
from common.request import Request, Response, Stamp
from common.serving.catalog import ModelMetadata, ModelState, ModelStatus
from common.serving.dataplane import DataPlane
from common.serving.policy import Only
from common.serving.router import Router
from common.serving.target import Estimate, Readiness
from common.telemetry.events import Hook, ignore
from common.tensors import TensorSpec

VERSION = "3"
MAX_BATCH = 8
SPECS = (TensorSpec(name="x", datatype="FP32", shape=(-1, 2)),)


class FakeTarget:
    """What it does depends on the model: `echo` answers its inputs, `double` twice its input, `photos` the classes."""

    def __init__(self, name: str = "edge", by: str = "node-a", version: str = VERSION) -> None:
        self.name, self.by, self.version = name, by, version
        self.requests: list[Request] = []
        self.started, self.was_cancelled = asyncio.Event(), asyncio.Event()

    async def infer(self, request: Request) -> Response:
        self.requests.append(request)
        if request.context.pin not in (None, self.version):
            raise VersionNotFound(request.model, request.context.pin or "", [self.version])
        match request.model:
            case "echo":
                outputs = dict(request.inputs)
            case "double":
                outputs = {"y": request.inputs["x"] * 2}
            case "photos":
                rows = len(next(iter(request.inputs.values())))
                row = [f"{0.5 ** (i + 1):f}:{i}:label {i}".encode() for i in range(request.classes)]
                outputs = {"probabilities": np.array([row] * rows, dtype=object)}
            case "slow":
                await self._hang(request)
            case "full":
                raise Overloaded("device 'cpu'", queued=9, limit=8, retry_after_s=1.2)
            case "down":
                raise Unavailable("nothing here can answer")
            case "narrow":
                raise OutsideProfile(request.model, "9 rows", "at most 8")
            case "sick":
                raise EngineError(request.model, "no memory")
            case "buggy":
                raise RuntimeError("secret detail")
            case _:
                raise ModelNotFound(request.model, ["double", "echo"])
        stamp = Stamp(target=self.name, model=request.model, version=self.version, by=self.by)
        return Response(outputs=outputs, stamp=stamp)

    async def _hang(self, request: Request) -> None:
        self.started.set()
        try:
            await asyncio.sleep(min(30.0, request.context.deadline - time.monotonic()))
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise
        raise DeadlineExceeded(request.model, "while it was queued")

    def readiness(self, model: str, version: str | None = None) -> Readiness:
        return Readiness.READY

    def estimate(self, request: Request) -> Estimate:
        return Estimate()


class FakeCatalog:
    def __init__(self, version: str = VERSION) -> None:
        self.version = version
        self.states = {"double": ModelState.READY, "echo": ModelState.READY, "asleep": ModelState.UNAVAILABLE}

    def _check(self, model: str, version: str | None) -> None:
        if model not in self.states:
            raise ModelNotFound(model, self.states)
        if version not in (None, self.version):
            raise VersionNotFound(model, version or "", [self.version])

    async def metadata(self, model: str, version: str | None) -> ModelMetadata:
        self._check(model, version)
        return ModelMetadata(
            name=model,
            versions=(self.version,),
            platform="onnxruntime_cpu-int8",
            inputs=SPECS,
            outputs=SPECS,
            max_batch=MAX_BATCH,
        )

    async def is_model_ready(self, model: str, version: str | None) -> bool:
        self._check(model, version)
        return self.states[model] is ModelState.READY

    async def index(self) -> list[ModelStatus]:
        return [ModelStatus(name=n, version=self.version, state=s) for n, s in self.states.items()]

    async def load(self, model: str) -> None:
        self._check(model, None)
        self.states[model] = ModelState.READY

    async def unload(self, model: str) -> None:
        self._check(model, None)
        self.states[model] = ModelState.UNAVAILABLE


def plane(
    target: FakeTarget, catalog: FakeCatalog | None = None, name: str = "node-a", on_event: Hook = ignore
) -> DataPlane:
    router = Router([target], Only(target.name))
    return DataPlane(name=name, router=router, catalog=catalog or FakeCatalog(), on_event=on_event)
