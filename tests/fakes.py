"""Fakes of the real interfaces, for all test folders. An engine that takes a + b * rows seconds, with failure modes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import numpy as np

from common.bundle import ModelConfig
from common.clock import Moment
from common.serving.engine import Batch, EngineFingerprint, Outputs
from common.serving.latency import LatencyModel
from common.serving.slot import LoadedEngine
from common.tensors import TensorSpec


class FakeClock:
    """A clock that moves only when it is told to."""

    def __init__(self, start: float = 1000.0) -> None:
        self.seconds = start

    def monotonic(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


class FakeBootClock:
    """A machine's clocks: the one that counts from its start, and the one on the wall."""

    def __init__(self) -> None:
        self.boot, self.boot_s, self.wall_s = 1, 1000.0, 1_800_000_000.0

    def moment(self) -> Moment:
        return Moment(boot=f"boot {self.boot}", boot_s=self.boot_s, wall_s=self.wall_s)

    def advance(self, seconds: float) -> None:
        self.boot_s += seconds
        self.wall_s += seconds

    def reboot(self, down_s: float) -> None:
        self.boot, self.boot_s, self.wall_s = self.boot + 1, 1.0, self.wall_s + down_s


def config(name: str = "double", *, max_batch: int = 8, width: int = 2, task: str = "tensor") -> ModelConfig:
    return ModelConfig(
        name=name,
        task=task,  # type: ignore[arg-type]
        inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, width)),),
        outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, width)),),
        max_batch=max_batch,
    )


@dataclass
class FakeEngine:
    """Answers y = factor * x. `gate`, where set, holds every batch until it is opened."""

    factor: float = 2.0
    base_s: float = 0.0
    per_row_s: float = 0.0
    gate: threading.Event | None = None
    fail: Callable[[Batch], Exception | None] = lambda _batch: None
    batches: list[int] = field(default_factory=list)  # rows of each batch that was run
    threads: set[int] = field(default_factory=set)
    is_closed: bool = False
    fingerprint: EngineFingerprint = field(
        default_factory=lambda: EngineFingerprint(engine="fake", engine_version="1", variant="full", device="none")
    )

    def warm(self) -> LatencyModel:
        return LatencyModel(self.base_s, self.per_row_s)

    def run(self, batch: Batch) -> list[Outputs | Exception]:
        assert not self.is_closed, "an engine was used after it was closed"
        self.batches.append(batch.rows)
        self.threads.add(threading.get_ident())
        if self.gate is not None:
            assert self.gate.wait(10)
        time.sleep(self.base_s + self.per_row_s * batch.rows)
        if (problem := self.fail(batch)) is not None:
            raise problem
        return [{"y": np.asarray(item["x"] * np.float32(self.factor))} for item in batch.items]

    def close(self) -> None:
        self.is_closed = True


def loaded(engine: FakeEngine, version: str = "1", model: ModelConfig | None = None) -> LoadedEngine:
    return LoadedEngine(engine=engine, config=model or config(), version=version, labels=(), latency=engine.warm())
