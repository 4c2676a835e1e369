"""A bundle: the folder that `outrider model build` makes, that a release carries and that an engine is opened from.

Owns `bundle.json` (format 1): the model's config, the variants with the files each engine needs, and the golden set.
A folder on a node holds the files of one variant only; nothing here says how files travel.

    bundle.json                  this description
    labels.txt                   one label per class (classification models)
    golden.safetensors           a few inputs and FP32's outputs for them
    cpu-int8/model.onnx          one folder per variant
    trt-int8/model.onnx
    full/model.onnx, full/model.safetensors
    report.json                  what the build measured (stays with the publisher)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common.config import from_json, to_json
from common.errors import BundleError, ConfigError
from common.images import ImagePipeline
from common.tensorfile import read_tensors
from common.tensors import Array, TensorSpec

FORMAT = 1
DESCRIPTION = "bundle.json"

Task = Literal["classification", "embedding", "tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRules:
    """What the model's owner allows caches to do with its answers."""

    ttl_s: float = 3600.0  # 0..: for how long an answer is good; 0: none is kept
    is_public: bool = False  # answers do not depend on who asks: the tenant is left out of the key
    keep_device_only: bool = False  # DEVICE_ONLY answers may go to the node's own disk cache

    def __post_init__(self) -> None:
        if not self.ttl_s >= 0:
            raise ValueError(f"ttl_s must be >= 0, got {self.ttl_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a model takes and gives. Shapes have -1 for free dimensions; the first dimension is the batch."""

    name: str
    task: Task
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int = 32
    posterior: Literal["softmax", "identity"] = "softmax"  # how the first output becomes class probabilities
    labels: str | None = None  # file in the bundle, one label a line
    image: ImagePipeline | None = None  # the first input also takes encoded pictures (BYTES) through this pipeline
    cache: CacheRules = field(default_factory=CacheRules)

    def __post_init__(self) -> None:
        if not self.name or not all(c.isalnum() or c in "-_." for c in self.name) or self.name.startswith("."):
            raise ValueError(
                f"model name {self.name!r} must be letters, digits, '-', '_' or '.', not starting with '.'"
            )
        if not 1 <= self.max_batch <= 65536:
            raise ValueError(f"max_batch must be 1..65536, got {self.max_batch}")
        if not self.inputs or not self.outputs:
            raise ValueError("a model needs at least one input and one output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One form of the parameters. `files` maps an engine's name to the files that it opens, the main one first."""

    name: str  # cpu-int8 | trt-int8 | full
    files: dict[str, tuple[str, ...]]
    min_memory_bytes: int = 0
    sku: tuple[str, ...] = ()  # device models it is for; empty: any


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenSpec:
    """The golden set's file and what a variant's answers on it may lose against FP32's (see `hardware/gate.py`).

    The file holds ``input.<name>`` (image models: uint8 NHWC pixels after crop, before normalization) and
    ``output.<name>`` (FP32's answers), the batch first; ``labels`` (int64) where the truth is known.
    """

    file: str
    metric: Literal["accuracy", "expected_accuracy", "cosine"]
    max_loss: dict[str, float]  # by variant name


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleSpec:
    model: ModelConfig
    variants: tuple[Variant, ...]  # in order of preference
    golden: GoldenSpec
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle folder that has been read and checked: every path stays inside it."""

    path: Path
    spec: BundleSpec

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Reads ``bundle.json``; raises `BundleError` when it is missing, of another format, or names outside files."""
        try:
            spec = from_json((path / DESCRIPTION).read_bytes(), BundleSpec, DESCRIPTION)
        except OSError as exc:
            raise BundleError(str(path), f"{DESCRIPTION} cannot be read: {exc.strerror}") from exc
        except ConfigError as exc:
            raise BundleError(str(path), str(exc)) from exc
        if spec.format != FORMAT:
            raise BundleError(str(path), f"format {spec.format}, this version reads format {FORMAT}")
        for name in files_of(spec):
            check_relative(name, str(path))
            if not (path / name).resolve().is_relative_to(path.resolve()):
                raise BundleError(str(path), f"file {name!r} is a link that leads out of the bundle")
        return cls(path=path, spec=spec)

    def file(self, name: str) -> Path:
        return self.path / name

    def variant(self, name: str) -> Variant:
        for variant in self.spec.variants:
            if variant.name == name:
                return variant
        raise BundleError(
            str(self.path), f"no variant {name!r}; it has {', '.join(v.name for v in self.spec.variants)}"
        )

    def labels(self) -> tuple[str, ...]:
        if self.spec.model.labels is None:
            return ()
        return tuple(self.file(self.spec.model.labels).read_text(encoding="utf-8").splitlines())

    def golden(self) -> dict[str, Array]:
        return read_tensors(self.file(self.spec.golden.file))


def write_spec(spec: BundleSpec, path: Path) -> None:
    (path / DESCRIPTION).write_bytes(to_json(spec, indent=1) + b"\n")


def files_of(spec: BundleSpec, variant: Variant | None = None, engine: str | None = None) -> tuple[str, ...]:
    """Every file that a release ships: the shared ones and those of `variant` for `engine` (all, where None)."""
    names = [DESCRIPTION, spec.golden.file]
    if spec.model.labels is not None:
        names.append(spec.model.labels)
    for one in (variant,) if variant else spec.variants:
        for of_engine, files in one.files.items():
            if engine in (None, of_engine):
                names += files
    return tuple(dict.fromkeys(names))


def check_relative(name: str, bundle: str) -> None:
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\\" in name or "\0" in name:
        raise BundleError(bundle, f"file name {name!r} is not a plain path inside the bundle")
