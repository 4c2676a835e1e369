"""Everything that answers on this machine, put together: device, models, their engines, and the way new ones come in.

The part that a node and a worker have in common; each adds its own router, transports and parameter agent around it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.bundle import Bundle
from common.errors import BundleError, ConfigError, DeadlineExceeded, IncompatibleRelease, Unavailable
from common.request import Context, Priority, Request
from common.serving.device import Device
from common.serving.local import LocalTarget
from common.serving.repository import Installed, Repository
from common.serving.slot import LoadedEngine
from common.telemetry.events import Hook, ignore
from common.tensors import Array
from hardware.install import EngineInstaller, EngineOptions, Opener

_ASK_S: Final = 10.0  # for one batch of a golden set that is run beside callers'


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticModel:
    """A bundle folder on this machine that is served without the parameter path."""

    bundle: str  # path of the bundle folder
    version: str = "1"  # the version that answers are stamped with


class LocalServing:
    """An async context. `target` answers requests, `repository` knows the models, `installer` takes new versions."""

    def __init__(
        self,
        target: str,
        options: EngineOptions,
        *,
        by: str,
        max_queue_rows: int = 256,
        on_event: Hook = ignore,
    ) -> None:
        self.device = Device(
            max_queue_rows=max_queue_rows,
            inline_below_s=options.inline_below_us / 1e6,
            hang_after_s=options.hang_after_s,
            on_event=on_event,
            on_hang=self._reopen,
        )
        self.repository = Repository(Opener(options), self.device.close_engine, on_event=on_event)
        self.target = LocalTarget(target, self.repository, self.device, by=by)
        self.installer = EngineInstaller(self.repository, options, self._ask)
        self._stack = AsyncExitStack()
        self._reopening: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LocalServing:
        self._loop = asyncio.get_running_loop()
        await self._stack.enter_async_context(self.device)
        self._stack.callback(self.repository.close)
        self._stack.callback(self.installer.close)
        await self._stack.enter_async_context(self.target)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._reopening, return_exceptions=True)
        await self._stack.aclose()

    def _reopen(self, hung: LoadedEngine) -> None:
        if (opening := self.repository.give_up(hung)) is not None:
            task = self._loop.create_task(opening, name=f"reopen-{hung.config.name}")
            self._reopening.add(task)
            task.add_done_callback(self._reopening.discard)

    def _ask(self, model: str, version: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """A request of the lowest class, from another thread than the event loop's."""
        deadline = time.monotonic() + _ASK_S
        context = Context(priority=Priority.OFFLINE, deadline=deadline, pin=version)
        request = Request(context=context, model=model, inputs=dict(inputs))
        try:
            asked = asyncio.run_coroutine_threadsafe(self.target.infer(request), self._loop)
        except RuntimeError as exc:  # the loop has ended
            raise Unavailable("this process is closing") from exc
        try:
            return asked.result(_ASK_S + 1.0).outputs
        except TimeoutError as exc:
            asked.cancel()
            raise DeadlineExceeded(model, "in a golden set that was run again") from exc

    async def serve_bundles(self, models: Sequence[StaticModel]) -> None:
        """Those of a configuration. Raises `ConfigError` where two of them are one model."""
        folders: dict[str, str] = {}
        for at, model in enumerate(models):
            name = Bundle.open(Path(model.bundle)).spec.model.name
            if name in folders:
                problem = f"{model.bundle} is model {name!r}, and so is {folders[name]}"
                raise ConfigError("models", f"[{at}].bundle", problem, "each model once")
            folders[name] = model.bundle
        for model in models:
            await self.serve_bundle(Path(model.bundle), model.version)

    async def serve_bundle(self, folder: Path, version: str) -> None:
        """Serves a bundle folder that lies on this machine, behind the same golden gate as a release."""
        await asyncio.to_thread(self._install, folder, version)

    def _install(self, folder: Path, version: str) -> None:
        spec = Bundle.open(folder).spec
        model = spec.model.name
        for variant in spec.variants:
            for engine in variant.files:
                if not self.installer.can_run(model, engine, variant):
                    continue
                prepared = self.installer.prepare(
                    Installed(model=model, version=version, folder=folder, variant=variant.name, engine=engine)
                )
                verdict = self.installer.gate(prepared)
                if not verdict.passed:
                    self.installer.discard(prepared)
                    raise BundleError(str(folder), f"fails its golden gate as {variant.name}: {verdict.detail}")
                self.installer.activate(prepared)
                self.installer.settle(model)  # nobody watches it
                return
        raise IncompatibleRelease(model, version, "no variant in the bundle is one that this process may and can run")
