"""The target that is this machine: check the request, decode pictures, queue it on the device, render its outputs."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from common.errors import OutriderError, OutsideProfile
from common.request import Request, Response, Stamp
from common.serving.device import Device
from common.serving.prepare import answer_tensors, check, engine_inputs, has_pictures, rows_of
from common.serving.repository import Repository
from common.serving.target import Estimate, Readiness

DECODERS = 2


class LocalTarget:
    """An async context that owns the threads for decoding pictures. `by` names the process in stamps."""

    def __init__(self, name: str, repository: Repository, device: Device, *, by: str = "") -> None:
        self.name = name
        self._repository, self._device, self._by = repository, device, by
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="decode")

    async def __aenter__(self) -> LocalTarget:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._decoders.shutdown(wait=False, cancel_futures=True)

    async def infer(self, request: Request) -> Response:
        lease = self._repository.lease(request.model, request.context.pin)
        loaded = lease.loaded
        try:
            check(request, loaded.config)
            if has_pictures(request, loaded.config):
                decode = partial(engine_inputs, request, loaded.config)
                inputs = await asyncio.get_running_loop().run_in_executor(self._decoders, decode)
            else:
                inputs = request.inputs
        except BaseException:
            lease.release()
            raise
        outputs = await self._device.run(lease, inputs, rows_of(request), request.context)
        return Response(
            outputs=answer_tensors(outputs, request, loaded),
            stamp=Stamp(target=self.name, model=request.model, version=loaded.version, by=self._by),
        )

    def readiness(self, model: str, version: str | None = None) -> Readiness:
        return self._repository.readiness(model, version)

    def estimate(self, request: Request) -> Estimate:
        """Queue plus one batch of this request's rows. Never raises: what is wrong with a request shows in `infer`."""
        loaded = self._repository.current(request.model)
        if loaded is None:
            return Estimate(seconds=float("inf"))
        scheduler = self._device.scheduler
        try:
            check(request, loaded.config)
            rows, outside = rows_of(request), ""
        except OutsideProfile as exc:
            rows, outside = 1, str(exc)
        except OutriderError:
            rows, outside = 1, ""
        return Estimate(
            seconds=scheduler.wait_s(request.context.priority, self._device.now) + loaded.latency.seconds(rows),
            queued_rows=scheduler.queued_rows + rows,
            queue_limit=self._device.max_queue_rows,
            outside_profile=outside,
        )
