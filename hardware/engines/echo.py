"""Echo: each output is the input of the same place. What a call costs without a model: benchmarks, trials of a set-up.

Opened from a bundle without files (`outrider model echo` writes one).
"""

from __future__ import annotations

from common.bundle import ModelConfig
from common.errors import EngineError
from common.serving.engine import Batch, EngineFingerprint, Outputs
from common.serving.latency import LatencyModel
from hardware.engines.base import EngineRequest, warm_up


class EchoEngine:
    def __init__(self, request: EngineRequest, names: dict[str, str]) -> None:
        self._config = request.config
        self._names: dict[str, str] | None = names
        self.fingerprint = EngineFingerprint(engine="echo", engine_version="1", variant=request.variant, device="cpu")

    def warm(self) -> LatencyModel:
        return warm_up(self.run, self._config)

    def run(self, batch: Batch) -> list[Outputs | Exception]:
        if self._names is None:
            raise EngineError(self._config.name, "the engine is closed")
        return [{output: item[name] for output, name in self._names.items()} for item in batch.items]

    def close(self) -> None:
        self._names = None


def open_engine(request: EngineRequest) -> EchoEngine:
    return EchoEngine(request, echoed(request.config))


def echoed(config: ModelConfig) -> dict[str, str]:
    """The input that each output returns. Raises `EngineError` for a config whose outputs cannot be its inputs."""
    if len(config.outputs) > len(config.inputs):
        raise EngineError(
            config.name, f"an echo of {len(config.inputs)} inputs cannot have {len(config.outputs)} outputs"
        )
    for output, source in zip(config.outputs, config.inputs, strict=False):
        if (output.datatype, output.shape) != (source.datatype, source.shape):
            raise EngineError(
                config.name,
                f"an echo's output {output.name!r} is {output.datatype} {list(output.shape)}, "
                f"its input {source.name!r} is {source.datatype} {list(source.shape)}: they must be the same",
            )
    return {output.name: source.name for output, source in zip(config.outputs, config.inputs, strict=False)}
