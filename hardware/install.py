"""Installs a release on this machine: choose, open, gate on the golden set, activate through the slot.

The node's and the worker's `Installer` (the parameter path hands it staged folders) and the opener of the repository.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from common.bundle import Bundle, ModelConfig, Variant, files_of
from common.errors import (
    BundleError,
    DeadlineExceeded,
    EngineError,
    ModelNotFound,
    ModelNotReady,
    OutriderError,
    Overloaded,
    Unavailable,
    VersionNotFound,
)
from common.serving.engine import Batch
from common.serving.repository import Held, Installed, Repository
from common.serving.slot import LoadedEngine
from common.serving.vitals import Vitals
from common.tensors import Array
from hardware import engines
from hardware.engines.base import EngineRequest
from hardware.engines.drill import Drill
from hardware.golden import Run, Verdict, golden_verdict

_NOT_NOW: Final = (Overloaded, DeadlineExceeded, Unavailable, ModelNotReady, ModelNotFound, VersionNotFound)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How engines are opened here. `variants` and `engines` are what this process is willing to run."""

    variants: tuple[str, ...] = ("trt-int8", "cpu-int8")  # forms of a model that this process may serve
    engines: tuple[str, ...] = ("tensorrt", "onnxruntime")  # back-ends, the preferred one first
    threads: int = 0  # 0..: threads of each engine; 0: half of the cores, at least one
    factories: Mapping[str, str] = field(default_factory=dict)  # model -> module:callable, for torch
    max_batch: Mapping[str, int] = field(default_factory=dict)  # 1..: rows; model -> a limit below the model's own
    synthetic: Mapping[str, Drill] = field(default_factory=dict)  # model -> what its synthetic engine plays
    # 1..3600: a batch that takes longer, and longer than twenty times what is expected, hangs: its engine is given up
    # and opened anew, and calls go elsewhere meanwhile
    hang_after_s: float = 30.0
    inline_below_us: float = 0.0  # 0..1000: batches predicted to take less run on the event loop, not on a thread
    golden_gate: bool = True  # off: serve whatever opens (drills only)

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ValueError(f"threads must be >= 0, got {self.threads}")
        if not 1 <= self.hang_after_s <= 3600:
            raise ValueError(f"hang_after_s must be 1..3600, got {self.hang_after_s}")
        if not 0 <= self.inline_below_us <= 1000:
            raise ValueError(f"inline_below_us must be 0..1000, got {self.inline_below_us}")
        for model, limit in self.max_batch.items():
            if limit < 1:
                raise ValueError(f"max_batch of {model!r} must be >= 1, got {limit}")
        if self.synthetic and "synthetic" not in self.engines:
            raise ValueError(f"synthetic is set for {', '.join(self.synthetic)}, but engines lacks 'synthetic'")


class Opener:
    """Opens installed bundle folders: the repository's way back to an engine after an unload."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options

    def __call__(self, installed: Installed) -> LoadedEngine:
        """Blocking; a warm engine. Raises `BundleError`, `EngineUnavailable`, `EngineError` or `ConfigError`."""
        bundle = Bundle.open(installed.folder)
        variant = bundle.variant(installed.variant)
        config = self._limited(bundle.spec.model)
        request = EngineRequest(
            config=config,
            variant=variant.name,
            files=tuple(bundle.file(name) for name in variant.files[installed.engine]),
            threads=self._options.threads or max(1, (os.cpu_count() or 1) // 2),
            factories=self._options.factories,
            drill=self._options.synthetic.get(config.name, Drill()),
        )
        identity = _identity(bundle, installed, request)
        engine = engines.open_engine(installed.engine, request)
        try:
            latency = engine.warm()
        except Exception as exc:
            engine.close()
            raise EngineError(config.name, f"does not run: {exc}") from exc
        return LoadedEngine(
            engine=engine,
            config=config,
            version=installed.version,
            labels=bundle.labels(),
            latency=latency,
            identity=identity,
        )

    def _limited(self, config: ModelConfig) -> ModelConfig:
        limit = self._options.max_batch.get(config.name, config.max_batch)
        return dataclasses.replace(config, max_batch=min(limit, config.max_batch))


class StagedRelease(Protocol):
    """What the parameter path hands over: a folder that is a bundle with one variant's files."""

    @property
    def model(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def folder(self) -> Path: ...
    @property
    def variant(self) -> str: ...
    @property
    def engine(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    loaded: LoadedEngine
    installed: Installed
    bundle: Bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched:
    """What was activated last, and what served before it."""

    prepared: Prepared
    before: Held | None


Ask = Callable[[str, str, Mapping[str, Array]], Mapping[str, Array]]


class EngineInstaller:
    """Called from the agent's thread, one release at a time."""

    def __init__(self, repository: Repository, options: EngineOptions, ask: Ask | None = None) -> None:
        """`ask`: a request to the engine of that model and version as any caller's, but of the lowest class. Blocks."""
        self._repository, self._options, self._ask = repository, options, ask
        self._open = Opener(options)
        self._watched: dict[str, _Watched] = {}

    def can_run(self, model: str, engine: str, variant: Variant) -> bool:
        if variant.name not in self._options.variants or engine not in self._options.engines:
            return False
        if engine == "torch" and model not in self._options.factories:
            return False
        return engines.is_available(engine) and variant.min_memory_bytes <= _memory_bytes()

    def prepare(self, staged: StagedRelease) -> Prepared:
        """Opens and warms the new engine while the old one serves."""
        self._repository.start_building(staged.model, f"version {staged.version}")
        installed = Installed(
            model=staged.model,
            version=staged.version,
            folder=staged.folder,
            variant=staged.variant,
            engine=staged.engine,
        )
        try:
            return Prepared(loaded=self._open(installed), installed=installed, bundle=Bundle.open(installed.folder))
        except OutriderError as exc:
            self._repository.stop_building(staged.model, str(exc))
            raise

    def gate(self, prepared: Prepared) -> Verdict:
        """Runs the golden set on the engine as it was built here and judges it against FP32's answers."""
        if not self._options.golden_gate:
            return Verdict(passed=True, detail="the golden gate is switched off")

        def run(inputs: Mapping[str, Array], rows: int) -> Mapping[str, Array]:
            [answer] = prepared.loaded.engine.run(Batch((inputs,), rows))
            if isinstance(answer, Exception):
                raise answer
            return answer

        return _judged(prepared, run)

    def activate(self, prepared: Prepared) -> None:
        """The engine that served before stays open until `settle` or `revert`."""
        model = prepared.installed.model
        held = self._repository.hold(model)
        self._repository.activate(prepared.loaded, prepared.installed)
        self.settle(model)
        self._watched[model] = _Watched(prepared=prepared, before=held)

    def vitals(self, model: str) -> tuple[Vitals, Vitals | None] | None:
        """How the engine does that was activated last, and how the one before did; None where nothing is watched."""
        watched = self._watched.get(model)
        if watched is None:
            return None
        before = None if watched.before is None else _vitals(watched.before.lease.loaded)
        return _vitals(watched.prepared.loaded), before

    def recheck(self, model: str) -> Verdict | None:
        """The golden set once more, as requests of the lowest class to the engine that serves; None where that cannot
        be said now (too busy, unloaded)."""
        watched = self._watched.get(model)
        if watched is None or self._ask is None or not self._options.golden_gate:
            return None
        prepared, ask = watched.prepared, self._ask
        busy: list[OutriderError] = []

        def run(inputs: Mapping[str, Array], _rows: int) -> Mapping[str, Array]:
            try:
                return ask(model, prepared.loaded.version, inputs)
            except _NOT_NOW as exc:
                busy.append(exc)
                raise

        verdict = _judged(prepared, run)
        return None if busy else verdict

    def settle(self, model: str) -> None:
        """The version that serves stays: the engine before it may go."""
        watched = self._watched.pop(model, None)
        if watched is not None and watched.before is not None:
            watched.before.lease.release()

    def revert(self, model: str) -> bool:
        """The engine that served before answers again. False where it is not open any more."""
        watched = self._watched.get(model)
        if watched is None or watched.before is None:
            return False
        self._repository.revert(watched.before)
        self.settle(model)
        return True

    def withdraw(self, model: str, reason: str) -> None:
        """Nothing of this model serves here any more."""
        self._repository.withdraw(model, reason)
        self.settle(model)

    def close(self) -> None:
        """Lets go of every engine that is kept open for a revert."""
        for model in list(self._watched):
            self.settle(model)

    def discard(self, prepared: Prepared) -> None:
        prepared.loaded.engine.close()
        self._repository.stop_building(prepared.installed.model)


def _identity(bundle: Bundle, installed: Installed, request: EngineRequest) -> str:
    """SHA-256 (hex) over all that an answer depends on: the engine, `bundle.json`, labels, and the variant's files."""
    whole = hashlib.sha256(repr((installed.engine, request.factories.get(request.config.name))).encode())
    for name in files_of(bundle.spec, bundle.variant(installed.variant), installed.engine):
        if name != bundle.spec.golden.file:
            whole.update(_file_digest(bundle.file(name)))
    return whole.hexdigest()


def _file_digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as exc:
        raise BundleError(str(path), f"cannot be read: {exc.strerror}") from exc


def _judged(prepared: Prepared, run: Run) -> Verdict:
    try:
        return golden_verdict(prepared.bundle, prepared.installed.variant, prepared.loaded.config, run)
    except Exception as exc:  # an engine that cannot run its own golden set has failed the gate
        return Verdict(passed=False, detail=f"the golden set does not run: {exc}")


def _vitals(loaded: LoadedEngine) -> Vitals:
    tally = loaded.tally
    latency_s = loaded.latency.seconds(1, time.monotonic()) if tally.answers else None
    return Vitals(version=loaded.version, answers=tally.answers, errors=tally.errors, latency_s=latency_s)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
