"""The target that is this machine: check the request, decode pictures, queue it on the device, render its outputs."""

from __future__ import annotations

from functools import partial

from common.bundle import ModelConfig
from common.errors import OutriderError, OutsideProfile
from common.request import Request, Response, Stamp
from common.serving.decoding import Decoders
from common.serving.device import Device
from common.serving.prepare import answer_tensors, check, engine_inputs, has_pictures, rows_of
from common.serving.repository import Repository
from common.serving.target import Estimate, Readiness
from common.tensors import Tensors


class LocalTarget:
    """An async context that owns the threads for decoding pictures. `by` names the process in stamps."""

    def __init__(self, name: str, repository: Repository, device: Device, *, by: str = "") -> None:
        self.name = name
        self._repository, self._device, self._by = repository, device, by
        self._decoders = Decoders()

    async def __aenter__(self) -> LocalTarget:
        await self._decoders.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._decoders.__aexit__()

    async def infer(self, request: Request) -> Response:
        lease = self._repository.lease(request.model, request.context.pin)
        loaded = lease.loaded
        inputs, rows = request.inputs, loaded.accepts.rows(request)
        try:
            if not rows:
                check(request, loaded.config)
                rows = rows_of(request)
                inputs = await self._inputs(request, loaded.config, rows)
        except BaseException:
            lease.release()
            raise
        outputs = await self._device.run(lease, inputs, rows, request.context)
        return Response(
            outputs=answer_tensors(outputs, request, loaded),
            stamp=Stamp(
                target=self.name,
                model=request.model,
                version=loaded.version,
                by=self._by,
                identity=loaded.identity,
            ),
        )

    async def _inputs(self, request: Request, config: ModelConfig, rows: int) -> Tensors:
        """The engine's inputs. Pictures keep their place in the device's queue while they are decoded."""
        if not has_pictures(request, config):
            return request.inputs
        with self._device.preparing(config.name, rows, request.context):
            return await self._decoders.run(partial(engine_inputs, request, config), config.name, request.context)

    def readiness(self, model: str, version: str | None = None) -> Readiness:
        return self._repository.readiness(model, version)

    def estimate(self, request: Request) -> Estimate:
        """Queue plus one batch of this request's rows. Never raises: what is wrong with a request shows in `infer`."""
        loaded = self._repository.current(request.model)
        if loaded is None:
            return Estimate(seconds=float("inf"))
        now, context = self._device.now, request.context
        rows, outside = loaded.accepts.rows(request), ""
        if not rows:
            rows, outside = _look(request, loaded.config)
        return Estimate(
            seconds=self._device.scheduler.wait_s(context.priority, now) + loaded.latency.seconds(rows, now),
            is_stale=loaded.latency.is_stale(now),
            queued_rows=self._device.rows_ahead(context.priority) + rows,
            queue_limit=self._device.max_queue_rows,
            outside_profile=outside,
        )


def _look(request: Request, config: ModelConfig) -> tuple[int, str]:
    """Rows, and what about the request lies outside the profile."""
    try:
        check(request, config)
        return rows_of(request), ""
    except OutsideProfile as exc:
        return 1, str(exc)
    except OutriderError:
        return 1, ""
