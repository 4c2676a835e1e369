"""Stand-ins with the real interfaces, and a small world: store, keys, service, bundles."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from common.bundle import BundleSpec, GoldenSpec, ModelConfig, Variant, write_spec
from common.errors import FetchError
from common.serving.vitals import Vitals
from common.tensorfile import write_tensors
from common.tensors import TensorSpec
from sync.agent import Agent, AgentConfig, GateVerdict, Staged
from sync.agent.ports import Range
from sync.agent.probation import ProbationLimits
from sync.events import Event
from sync.publisher import Publisher
from sync.service import ServiceConfig, service
from sync.store import Store
from sync.trust.keys import Keys
from sync.trust.repository import Repository


class Killed(BaseException):
    """The process dies here: nothing catches it, nothing cleans up."""


class FakeClock:
    """Stands still unless told."""

    def __init__(self, now: datetime | None = None) -> None:
        self.wall, self.seconds = now or datetime.now(UTC), 0.0

    def monotonic(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return self.wall

    def advance(self, **delta: float) -> None:
        self.wall += timedelta(**delta)
        self.seconds += timedelta(**delta).total_seconds()


@dataclass
class FakeInstaller:
    """Keeps what it was told; `fail` maps a method's name to what it raises, `bad` are versions the gate refuses."""

    serving: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)
    fail: dict[str, BaseException] = field(default_factory=dict)
    variants: tuple[str, ...] = ("cpu-int8", "full")
    before: dict[str, str] = field(default_factory=dict)  # what is kept ready for a revert
    measured: dict[str, tuple[Vitals, Vitals | None]] = field(default_factory=dict)
    rechecked: list[str] = field(default_factory=list)
    bad_later: set[str] = field(default_factory=set)  # versions that fail the golden set when they serve

    def can_run(self, model: str, engine: str, variant: Variant) -> bool:
        return variant.name in self.variants

    def prepare(self, staged: Staged) -> Staged:
        self._call("prepare", staged)
        assert (staged.folder / "bundle.json").is_file()
        return staged

    def gate(self, prepared: Staged) -> GateVerdict:
        self._call("gate", prepared)
        is_good = prepared.version not in self.bad
        return GateVerdict(passed=is_good, detail="loss 0.001" if is_good else "loss 0.9 is over 0.02")

    def activate(self, prepared: Staged) -> None:
        self._call("activate", prepared)
        self.before.pop(prepared.model, None)
        if prepared.model in self.serving:
            self.before[prepared.model] = self.serving[prepared.model]
        self.serving[prepared.model] = prepared.version

    def discard(self, prepared: Staged) -> None:
        self.discarded.append(prepared.version)

    def vitals(self, model: str) -> tuple[Vitals, Vitals | None] | None:
        return self.measured.get(model)

    def recheck(self, model: str) -> GateVerdict | None:
        self.rechecked.append(self.serving[model])
        is_good = self.serving[model] not in self.bad_later
        return GateVerdict(passed=is_good, detail="loss 0.001" if is_good else "loss 0.5 is over 0.02")

    def settle(self, model: str) -> None:
        self.before.pop(model, None)

    def revert(self, model: str) -> bool:
        version = self.before.pop(model, None)
        if version is None:
            return False
        self.serving[model] = version
        return True

    def withdraw(self, model: str, reason: str) -> None:
        self.serving.pop(model, None)

    def _call(self, name: str, staged: Staged) -> None:
        self.calls.append((name, staged.version))
        if name in self.fail:
            raise self.fail[name]


class StoreSource:
    """A `Source` that reads a store without a network; `tamper` may change any answer, by the file's name."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.tamper: Callable[[str, bytes], bytes] = lambda name, data: data
        self.fetched: list[Range] = []  # of slabs and table sets
        self.indexes: list[str] = []
        self.error: Exception | None = None

    def read(self, name: str) -> Iterator[bytes]:
        if self.error is not None:
            raise self.error
        data = self.store.read(name)
        if data is None:
            raise FetchError(name, "not there", is_permanent=True)
        yield self.tamper(name, data)

    def fetch(self, ranges: Sequence[Range]) -> Iterator[bytes | None]:
        if self.error is not None:
            raise self.error
        for one in ranges:
            if one.name.endswith(".index"):
                self.indexes.append(one.name)
            else:
                self.fetched.append(one)
            size, data = self.store.part(one.name, one.offset, one.most) or (0, b"")
            if size > one.most and not one.length:
                raise FetchError(one.name, "endless data", is_permanent=True)
            is_whole = len(data) == one.length if one.length else len(data) > 0
            yield self.tamper(one.name, data) if is_whole else None

    def close(self) -> None:
        pass


class World:
    """A store with keys and a publisher in a temporary folder, and agents on it."""

    def __init__(self, folder: Path, clock: FakeClock | None = None) -> None:
        self.folder, self.clock = folder, clock or FakeClock()
        self.store = Store(folder / "store")
        self.keys = Keys.create(folder / "keys")
        self.root = folder / "root.json"
        self.root.write_bytes(Repository(self.store, self.keys, clock=self.clock).create())
        self.publisher = Publisher(self.store, self.keys, clock=self.clock)
        self.source = StoreSource(self.store)
        self.events: list[Event] = []

    def publish(self, weights: dict[str, Any], model: str = "digits", **options: Any) -> Any:
        return self.publisher.publish(make_bundle(self.folder / "bundle", model, weights), **options)

    def agent(self, installer: FakeInstaller, name: str = "node", **options: Any) -> Agent:
        """An agent whose calls go to `source` (default: this world's store), on the folder `name`."""
        wiring = {"source": self.source, "on_event": self.events.append, "clock": self.clock}
        wiring |= {key: options.pop(key) for key in ("source", "on_event", "clock", "reporter") if key in options}
        return Agent(self.agent_config(name, **options), installer, **wiring)

    def agent_config(self, name: str = "node", **options: Any) -> AgentConfig:
        options.setdefault("probation", ProbationLimits(seconds=0))
        return AgentConfig(
            folder=self.folder / name, root=self.root, source=options.pop("address", "unused"), **options
        )

    def events_of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def weights(seed: int = 0, *, rows: int = 64) -> dict[str, Any]:
    """Two large tensors and two small ones."""
    rng = np.random.default_rng(seed)
    return {
        "conv.weight": rng.normal(size=(rows, 128)).astype(np.float32),
        "conv.bias": rng.normal(size=(rows,)).astype(np.float32),
        "fc.weight": rng.normal(size=(rows, 256)).astype(np.float32),
        "fc.bias": rng.normal(size=(10,)).astype(np.float32),
    }


def trained(old: dict[str, Any], *names: str, seed: int = 1) -> dict[str, Any]:
    """The same model with small steps in the tensors `names` (all, where none is given)."""
    rng = np.random.default_rng(seed)
    new = dict(old)
    for name in names or old:
        new[name] = old[name] + rng.normal(scale=1e-4, size=old[name].shape).astype(np.float32)
    return new


def make_bundle(folder: Path, model: str, tensors: dict[str, Any]) -> Path:
    """A bundle with two variants whose parameters are `tensors` (int8 of them in cpu-int8)."""
    for variant in ("cpu-int8", "full"):
        (folder / variant).mkdir(parents=True, exist_ok=True)
    small = {name: np.clip(np.rint(value * 40), -127, 127).astype(np.int8) for name, value in tensors.items()}
    write_tensors(folder / "cpu-int8/model.safetensors", small)
    write_tensors(folder / "full/model.safetensors", tensors)
    write_tensors(folder / "golden.safetensors", {"input.x": np.zeros((2, 4), np.float32)})
    (folder / "labels.txt").write_text("\n".join(str(i) for i in range(10)))
    (folder / "report.json").write_text(json.dumps({"stays": "with the publisher"}))
    write_spec(bundle_spec(model), folder)
    return folder


def bundle_spec(model: str) -> BundleSpec:
    spec = TensorSpec(name="x", datatype="FP32", shape=(-1, 4))
    return BundleSpec(
        model=ModelConfig(name=model, task="classification", inputs=(spec,), outputs=(spec,), labels="labels.txt"),
        variants=(
            Variant(name="cpu-int8", files={"onnxruntime": ("cpu-int8/model.safetensors",)}),
            Variant(name="full", files=dict.fromkeys(("onnxruntime", "torch"), ("full/model.safetensors",))),
        ),
        golden=GoldenSpec(file="golden.safetensors", metric="accuracy", max_loss={"cpu-int8": 0.02, "full": 0.001}),
    )


@contextlib.contextmanager
def running(config: ServiceConfig) -> Iterator[str]:
    """A real sync service on its own loop in a thread; yields its address."""
    started: Future[str] = Future()
    loop, stopped = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        try:
            async with service(config, drain_s=0.2) as address:
                started.set_result(address)
                await stopped.wait()
        except BaseException as exc:
            if started.done():
                raise
            started.set_exception(exc)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="test-sync-service")
    thread.start()
    try:
        yield started.result(10)
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(10)
        loop.close()
