"""ONNX Runtime on the CPU: the reference engine of any Linux box, and of `full` models made from an ONNX file."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from common.errors import EngineError, InvalidInput
from common.serving.engine import Batch, EngineFingerprint, Outputs
from common.serving.latency import LatencyModel
from common.tensors import BYTES, Array, Tensors
from hardware.engines.base import EngineRequest, gather, scatter, warm_up

_PROVIDER = "CPUExecutionProvider"


class OnnxRuntimeEngine:
    def __init__(self, request: EngineRequest, session: ort.InferenceSession) -> None:
        self._config = request.config
        self._session: ort.InferenceSession | None = session
        self._outputs = [spec.name for spec in request.config.outputs]
        self._texts = [spec.name for spec in request.config.inputs if spec.datatype == BYTES]
        self.fingerprint = EngineFingerprint(
            engine="onnxruntime", engine_version=str(ort.__version__), variant=request.variant, device="cpu"
        )

    def warm(self) -> LatencyModel:
        return warm_up(self.run, self._config)

    def run(self, batch: Batch) -> list[Outputs | Exception]:
        if self._session is None:
            raise EngineError(self._config.name, "the engine is closed")
        if not self._texts:
            return self._run(self._session, batch)
        items = [_decoded(item, self._texts) for item in batch.items]
        good = tuple(item for item in items if not isinstance(item, InvalidInput))
        rows = sum(len(next(iter(item.values()))) for item in good)
        answers = iter(self._run(self._session, Batch(good, rows)) if good else ())
        return [item if isinstance(item, InvalidInput) else next(answers) for item in items]

    def _run(self, session: ort.InferenceSession, batch: Batch) -> list[Outputs | Exception]:
        values = session.run(self._outputs, gather(batch))
        return scatter(dict(zip(self._outputs, values, strict=True)), batch)

    def close(self) -> None:
        self._session = None


def _decoded(item: Tensors, names: list[str]) -> Tensors | InvalidInput:
    """BYTES as the text that the library's strings are; it would take bytes for how Python prints them."""
    texts: dict[str, Array] = {}
    for name in names:
        try:
            flat = [e.decode() if isinstance(e, bytes) else e for e in item[name].ravel()]
            texts[name] = np.array(flat, dtype=object).reshape(item[name].shape)
        except UnicodeDecodeError:
            return InvalidInput(f"inputs[{name!r}]", "BYTES that are not UTF-8 text", "text: this model takes strings")
    return {**item, **texts}


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
