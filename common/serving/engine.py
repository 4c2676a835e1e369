"""The seam to whatever computes. An engine blocks, and is called by one thread at a time: by who opens, warms and gates
it first, then by its device's thread alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from common.serving.latency import LatencyModel
from common.tensors import Array, Tensors

Outputs = Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFingerprint:
    """What exactly computes: enough to know whether a stored engine or a measurement still belongs to it."""

    engine: str  # onnxruntime, torch, ...
    engine_version: str
    variant: str  # cpu-int8, full, ...
    device: str  # cpu, cuda:0, ...

    @property
    def platform(self) -> str:
        return f"{self.engine}_{self.variant}"


class Batch(msgspec.Struct, frozen=True, eq=False):
    """The inputs of several requests, one mapping each; equal dtypes and row shapes. `rows` counts all rows."""

    items: tuple[Tensors, ...]
    rows: int


class Engine(Protocol):
    fingerprint: EngineFingerprint

    def warm(self) -> LatencyModel:
        """Runs the engine a few times, so that the first request is not the slowest, and says what it measured."""
        ...

    def run(self, batch: Batch) -> list[Outputs | Exception]:
        """One answer per item, in order; an item's own failure is its exception, never one failure for all."""
        ...

    def close(self) -> None: ...
