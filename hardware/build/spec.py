"""What a user asks for: `model.toml`, parsed once into frozen dataclasses. Paths in it are relative to the file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common.bundle import CacheRules, ModelConfig, Task
from common.config import load_toml
from common.images import ImagePipeline
from common.tensors import TensorSpec
from hardware.gate import Metric, Posterior


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An ONNX file, or a torch factory (``package.module:callable``, called without arguments) and its checkpoint."""

    onnx: str | None = None
    factory: str | None = None
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        if (self.onnx is None) == (self.factory is None):
            raise ValueError("a source is either onnx, or factory with checkpoint")
        if (self.factory is None) != (self.checkpoint is None):
            raise ValueError("factory and checkpoint go together")
        if self.factory is not None and self.factory.count(":") != 1:
            raise ValueError(f"factory {self.factory!r} is not of the form package.module:callable")
        if self.checkpoint is not None and not self.checkpoint.endswith(".safetensors"):
            raise ValueError(
                f"checkpoint {self.checkpoint!r} is not a .safetensors file; pickled checkpoints are not opened, "
                "they can run code: convert it with safetensors.torch.save_file"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Arrays by input name, one row per sample; uint8 NHWC pixels after crop for image models."""

    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdout:
    """Like `Calibration`; may hold ``labels`` (int64, the true classes) and ``groups`` (int64, one per photo)."""

    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """How much a variant may lose on the held-out rows, and how much of it may stay in float to get there."""

    metric: Metric | None = None  # None: accuracy with labels, expected_accuracy without, cosine for other tasks
    max_drop: float = 0.02
    max_float_share: float = 0.25  # of the MACs
    float_layers: tuple[str, ...] = ()  # left in float from the start

    def __post_init__(self) -> None:
        if not 0 <= self.max_drop < 1:
            raise ValueError(f"max_drop must be in [0, 1), got {self.max_drop}")
        if not 0 <= self.max_float_share <= 1:
            raise ValueError(f"max_float_share must be in [0, 1], got {self.max_float_share}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    name: str
    task: Task
    source: Source
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    holdout: Holdout
    calibration: Calibration | None = None
    gate: Gate = field(default_factory=Gate)
    quantize: Literal["static"] = "static"
    max_batch: int = 32
    labels: str | None = None
    image: ImagePipeline | None = None
    posterior: Posterior = "softmax"
    cache: CacheRules = field(default_factory=CacheRules)

    def __post_init__(self) -> None:
        self.config()  # the same rules hold here and in the bundle

    def config(self) -> ModelConfig:
        """The model's config as the bundle will carry it."""
        return ModelConfig(
            name=self.name,
            task=self.task,
            inputs=self.inputs,
            outputs=self.outputs,
            max_batch=self.max_batch,
            posterior=self.posterior,
            labels=None if self.labels is None else "labels.txt",
            image=self.image,
            cache=self.cache,
        )


def load_spec(path: Path) -> ModelSpec:
    """Reads ``model.toml``; raises `ConfigError` with the key's full path for anything unknown or wrong."""
    return load_toml(path, ModelSpec)
