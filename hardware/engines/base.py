"""What every back-end shares: what it is opened from, and how requests become one batch and back."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.bundle import ModelConfig
from common.errors import ConfigError
from common.serving.engine import Batch, Outputs
from common.serving.latency import LatencyModel, measure
from common.tensors import Array, Tensors, dtype_of
from hardware.engines.drill import Drill


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """Everything a back-end is opened from. `factories` maps a model to ``module:callable`` (torch only); `drill` is
    what a synthetic engine plays."""

    config: ModelConfig
    variant: str
    files: tuple[Path, ...]  # the main one first
    threads: int = 1
    factories: Mapping[str, str] = field(default_factory=dict)
    drill: Drill = field(default_factory=Drill)


def gather(batch: Batch) -> dict[str, Array]:
    """Concatenates the items' inputs along the batch dimension, without a copy for a single item."""
    if len(batch.items) == 1:
        return dict(batch.items[0])
    return {name: np.concatenate([item[name] for item in batch.items]) for name in batch.items[0]}


def scatter(outputs: Mapping[str, Array], batch: Batch) -> list[Outputs | Exception]:
    """Cuts the batch's outputs back into one mapping per item.

    Raises `ValueError` where an output does not have one row per input row: then no caller may be given any of it.
    """
    for name, array in outputs.items():
        if array.shape[:1] != (batch.rows,):
            raise ValueError(f"output {name!r} has shape {list(array.shape)} for a batch of {batch.rows} rows")
    if len(batch.items) == 1:
        return [outputs]
    answers: list[Outputs | Exception] = []
    start = 0
    for item in batch.items:
        stop = start + next(iter(item.values())).shape[0]
        answers.append({name: array[start:stop] for name, array in outputs.items()})
        start = stop
    return answers


def warm_up(run: Callable[[Batch], object], config: ModelConfig) -> LatencyModel:
    """Measures an engine on zeros of the declared shapes (free dimensions as 1)."""

    def once(rows: int) -> None:
        run(Batch((zeros(config, rows),), rows))

    return measure(once, config.max_batch, time.monotonic)


def zeros(config: ModelConfig, rows: int) -> Tensors:
    inputs = {}
    for spec in config.inputs:
        shape = (rows, *(1 if d == -1 else d for d in spec.shape[1:]))
        dtype = dtype_of(spec.datatype, spec.name)
        inputs[spec.name] = np.full(shape, b"", dtype=object) if dtype.kind == "O" else np.zeros(shape, dtype)
    return inputs


def import_factory(name: str, where: str) -> Callable[..., Any]:
    """The callable that ``module:attribute`` names. Only ever called with names from this process's own config."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(
            where, "factory", f"{name!r} cannot be imported: {exc}", "module:callable, installed here"
        ) from exc
    if not callable(found):
        raise ConfigError(where, "factory", f"{name!r} is not callable", "module:callable")
    return found  # type: ignore[no-any-return]
