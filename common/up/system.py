"""The whole system on one machine: first start prepares keys, bundles and releases; then children, until all serve.

Owns the state folder:

    up.lock                  held by who runs here
    keys/ store/ root.json   signing keys, releases, the root that nodes trust
    released/                which version of each model was released at the first start
    sources/ bundles/        what was built from, and what was built (elsewhere with --bundles)
    config/ run/ log/        each child's configuration, endpoint file and output (8 MiB, and as much before it)
    NAME/                    a node's or a worker's own state
    endpoints.json           each process: addresses, pid and models
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TextIO

from common.config import to_json
from common.errors import ConfigError, OutriderError, TargetUnreachable
from common.up.client import CallFailed, Client
from common.up.commands import OUTRIDER, outrider
from common.up.demo import DemoModel
from common.up.layout import KINDS, Layout, Process, processes
from common.up.supervisor import Program, Supervisor

READY_S = 180.0
_LOOK_S = 0.1
_WATCH_S = 1.0

Say = Callable[[str], None]


class NotReady(OutriderError):
    """The children did not come up in time; the message says which and shows the end of a log."""


class System:
    """An async context once `prepare` is done: entering starts everything and waits, leaving stops it in order."""

    def __init__(self, layout: Layout, *, bundles: Path | None, say: Say) -> None:
        self.layout, self.say = layout, say
        self.work = bundles or layout.state
        self.processes = processes(layout)
        self.supervisor = Supervisor(on_note=say)
        self.is_up = False
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> System:
        await self._stack.enter_async_context(self.supervisor)
        try:
            for process in self.processes:
                await self.start(process.name)
            await self.until_ready()
            watching = asyncio.create_task(self._keep_endpoints(), name="endpoints")
            self._stack.callback(watching.cancel)
            self.is_up = True
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        (self.layout.state / "endpoints.json").unlink(missing_ok=True)

    # --- first start ---

    async def prepare(self) -> None:
        """Keys, bundles and first releases, where they are not there yet."""
        layout = self.layout
        layout.state.mkdir(parents=True, exist_ok=True)
        keys = ("--keys", str(layout.keys), "--store", str(layout.store), "--root", str(layout.root))
        await outrider("sync", "keys", "init", "--if-absent", *keys, say=lambda _line: None)
        try:
            async with asyncio.TaskGroup() as group:
                for model in layout.models:
                    group.create_task(self._first_release(model))
        except BaseExceptionGroup as exc:  # the first failure ended the others: it is the one to read
            raise exc.exceptions[0] from None

    async def source(self, model: DemoModel) -> Path:
        """The model's source folder, written by `outrider demo prepare` where it is not there yet."""
        await self.sources(model)
        return self._folder(model)

    async def sources(self, *stages: DemoModel) -> None:
        """The folders of several stages of one model, in one go."""
        missing = [stage for stage in stages if not (self._folder(stage) / "model.toml").exists()]
        if not missing:
            return
        flags = [flag for stage in missing for flag in ("--stage", stage.stage)]
        out = self._folder(missing[0]) if len(missing) == 1 else self.work / "sources"
        await outrider("demo", "prepare", missing[0].name, *flags, "--out", str(out), say=self.say)

    def _folder(self, model: DemoModel) -> Path:
        return self.work / "sources" / model.source

    async def publish(self, model: DemoModel, *flags: str) -> dict[str, Any]:
        """Builds (once per content) and releases; what `outrider publish --json` says. Raises `CommandFailed`."""
        spec = await self.source(model) / "model.toml"
        where = ("--store", str(self.layout.store), "--keys", str(self.layout.keys))
        kept = ("--bundles", str(self.work / "bundles"))
        answer: dict[str, Any] = json.loads(
            await outrider("publish", str(spec), *where, *kept, "--json", *flags, say=self.say)
        )
        return answer

    async def _first_release(self, model: DemoModel) -> None:
        """Once per state folder: what was released later must not be taken back by a restart."""
        mark = self.layout.state / "released" / model.name
        if not mark.exists():
            published = await self.publish(model)
            mark.parent.mkdir(exist_ok=True)
            mark.write_text(published["version"], encoding="utf-8")

    # --- children ---

    def process(self, name: str) -> Process:
        return next(process for process in self.processes if process.name == name)

    async def start(self, name: str) -> None:
        process = self.process(name)
        await self.supervisor.start(_program(process, self.layout.state))

    async def stop(self, name: str) -> None:
        await self.supervisor.stop(name)
        (self.layout.state / "run" / f"{name}.json").unlink(missing_ok=True)

    def endpoint(self, name: str) -> dict[str, Any] | None:
        """What a running child says of itself; None while it has not said so since its last start."""
        with contextlib.suppress(OSError, ValueError):
            told: dict[str, Any] = json.loads((self.layout.state / "run" / f"{name}.json").read_bytes())
            if told.get("pid") == self.supervisor.pid(name):
                return told
        return None

    def http(self, name: str) -> str:
        return f"http://127.0.0.1:{self.layout.ports[f'{name}.http']}"

    async def until_ready(self, timeout_s: float = READY_S) -> None:
        """Returns when every process serves what it should. Raises `NotReady`."""
        deadline = time.monotonic() + timeout_s
        async with Client() as client:
            missing = [process.name for process in self.processes]
            while missing:
                missing = [one.name for one in self.processes if not await self._serves(one, client)]
                if missing and time.monotonic() > deadline:
                    raise NotReady(self._why_not(missing, timeout_s))
                await asyncio.sleep(_LOOK_S)
        self._write_endpoints()

    async def _serves(self, process: Process, client: Client) -> bool:
        told = self.endpoint(process.name)
        if told is None:
            return False
        if "http" not in told:
            return True
        base = self.http(process.name)
        with contextlib.suppress(CallFailed, TargetUnreachable):
            has = await client.index(base)
            ready = {name for name, entry in has.items() if entry["state"] == "READY"}
            return await client.is_ready(base) and ready.issuperset(process.models)
        return False

    def _why_not(self, missing: list[str], timeout_s: float) -> str:
        log = self.layout.state / "log" / f"{missing[0]}.log"
        tail = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
        shown = "".join(f"\n  {line}" for line in tail)
        return f"not ready after {timeout_s:.0f} s: {', '.join(missing)}; the end of {log}:{shown}"

    async def _keep_endpoints(self) -> None:
        """A restarted child has another pid."""
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                self._write_endpoints()
            except OSError as exc:  # a full disk: tried again
                self.say(f"endpoints.json cannot be written: {exc}")

    def _write_endpoints(self) -> None:
        entries = [
            {"kind": process.kind, "models": list(process.models)}
            | (self.endpoint(process.name) or {"name": process.name})
            for process in self.processes
        ]
        path = self.layout.state / "endpoints.json"
        data = to_json({"state": str(self.layout.state), "processes": entries}, indent=1) + b"\n"
        if not path.exists() or path.read_bytes() != data:
            partial = path.with_suffix(".tmp")
            partial.write_bytes(data)
            partial.replace(path)


@contextlib.asynccontextmanager
async def owning(state: Path) -> AsyncIterator[None]:
    """The state folder for this process alone. Raises `ConfigError` where another `outrider up` has it."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        lock: TextIO = (state / "up.lock").open("w")
    except OSError as exc:
        raise ConfigError("up", "--state", f"{state} cannot be used: {exc.strerror}", "a folder to write in") from exc
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise ConfigError("up", "--state", f"another `outrider up` runs in {state}", "another folder") from exc
        (state / "endpoints.json").unlink(missing_ok=True)  # of one that was killed
        yield


def _program(process: Process, state: Path) -> Program:
    arguments = [*process.command, "--endpoint-file", str(state / "run" / f"{process.name}.json")]
    if process.config:
        config = state / "config" / f"{process.name}.toml"
        config.parent.mkdir(exist_ok=True)
        config.write_text(process.config, encoding="utf-8")
        arguments += ["--config", str(config)]
    log = state / "log" / f"{process.name}.log"
    return Program(name=process.name, argv=(*OUTRIDER, *arguments), log=log, rank=KINDS.index(process.kind))
