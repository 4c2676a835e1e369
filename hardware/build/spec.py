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

    onnx: str | None = None  # path of an ONNX file
    factory: str | None = None  # package.module:callable that makes the torch module
    checkpoint: str | None = None  # path of the factory's parameters: a .safetensors file

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

    file: str  # path of a .safetensors file


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdout:
    """Like `Calibration`; may hold ``labels`` (int64, the true classes) and ``groups`` (int64, one per photo)."""

    file: str  # path of a .safetensors file


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """How much a variant may lose on the held-out rows, and how much of it may stay in float to get there."""

    # how loss is measured; none: accuracy with labels, expected_accuracy without, cosine for other tasks
    metric: Metric | None = None
    max_drop: float = 0.02  # most that a variant may lose against FP32; 0 or more, below 1
    max_float_share: float = 0.25  # 0..1: most of the MACs that may stay in float
    float_layers: tuple[str, ...] = ()  # names of layers left in float from the start

    def __post_init__(self) -> None:
        if not 0 <= self.max_drop < 1:
            raise ValueError(f"max_drop must be in [0, 1), got {self.max_drop}")
        if not 0 <= self.max_float_share <= 1:
            raise ValueError(f"max_float_share must be in [0, 1], got {self.max_float_share}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    name: str  # letters, digits, '-', '_' and '.'; not starting with '.'
    task: Task  # what its first output is
    source: Source  # what is built
    inputs: tuple[TensorSpec, ...]  # one or more
    outputs: tuple[TensorSpec, ...]  # one or more
    holdout: Holdout  # rows that the gate judges on
    calibration: Calibration | None = None  # rows that quantization takes its scales from; needed for INT8
    gate: Gate = field(default_factory=Gate)  # what a variant may lose
    quantize: Literal["static"] = "static"  # how INT8 is made: scales are fixed at the build, from calibration
    max_batch: int = 32  # 1..65536: rows of one run of the engine
    labels: str | None = None  # path of a text file, one label a line
    image: ImagePipeline | None = None  # the first input also takes JPEG and PNG files through this
    posterior: Posterior = "softmax"  # how the first output becomes class probabilities
    cache: CacheRules = field(default_factory=CacheRules)  # what caches may do with its answers

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
