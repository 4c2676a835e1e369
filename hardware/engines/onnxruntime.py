"""ONNX Runtime on the CPU: the reference engine of any Linux box, and of `full` models made from an ONNX file."""

from __future__ import annotations

import onnxruntime as ort

from common.errors import EngineError
from common.serving.engine import Batch, EngineFingerprint, Outputs
from common.serving.latency import LatencyModel
from hardware.engines.base import EngineRequest, gather, scatter, warm_up

_PROVIDER = "CPUExecutionProvider"


class OnnxRuntimeEngine:
    def __init__(self, request: EngineRequest, session: ort.InferenceSession) -> None:
        self._config = request.config
        self._session: ort.InferenceSession | None = session
        self._outputs = [spec.name for spec in request.config.outputs]
        self.fingerprint = EngineFingerprint(
            engine="onnxruntime", engine_version=str(ort.__version__), variant=request.variant, device="cpu"
        )

    def warm(self) -> LatencyModel:
        return warm_up(self.run, self._config)

    def run(self, batch: Batch) -> list[Outputs | Exception]:
        if self._session is None:
            raise EngineError(self._config.name, "the engine is closed")
        values = self._session.run(self._outputs, gather(batch))
        return scatter(dict(zip(self._outputs, values, strict=True)), batch)

    def close(self) -> None:
        self._session = None


def open_engine(request: EngineRequest) -> OnnxRuntimeEngine:
    """Loads the variant's graph with all optimizations. Raises `EngineError` for a graph that does not load or fit."""
    config = request.config
    options = ort.SessionOptions()
    options.intra_op_num_threads = request.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # an idle node must not burn a core
    try:
        session = ort.InferenceSession(str(request.files[0]), options, providers=[_PROVIDER])
    except Exception as exc:  # the library raises its own classes, all directly below Exception
        raise EngineError(config.name, f"{request.files[0].name} does not load: {exc}") from exc
    if session.get_providers() != [_PROVIDER]:
        raise EngineError(config.name, f"runs on {session.get_providers()}, asked for {_PROVIDER}")
    for kind, declared, found in (
        ("inputs", config.inputs, session.get_inputs()),
        ("outputs", config.outputs, session.get_outputs()),
    ):
        names, has = [spec.name for spec in declared], [node.name for node in found]
        if not set(names) <= set(has) or (kind == "inputs" and len(names) != len(has)):
            raise EngineError(config.name, f"the graph's {kind} are {has}, the config declares {names}")
    return OnnxRuntimeEngine(request, session)
