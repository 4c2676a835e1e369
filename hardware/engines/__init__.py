"""Back-ends by name. A back-end's heavy import happens inside its own file, when it is first opened."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from typing import NamedTuple

from common.errors import EngineUnavailable
from common.serving.engine import Engine
from hardware.engines.base import EngineRequest


class _Backend(NamedTuple):
    module: str
    needs: str  # what must be importable


_BACKENDS = {
    "onnxruntime": _Backend("hardware.engines.onnxruntime", "onnxruntime"),
    "torch": _Backend("hardware.engines.torch", "torch"),
    "echo": _Backend("hardware.engines.echo", "numpy"),
    "synthetic": _Backend("hardware.engines.synthetic", "numpy"),
}
NAMES = tuple(_BACKENDS)


def is_available(engine: str) -> bool:
    """Whether the back-end's library is installed here. An unknown name (a newer release's engine) is not."""
    backend = _BACKENDS.get(engine)
    return backend is not None and importlib.util.find_spec(backend.needs) is not None


def open_engine(engine: str, request: EngineRequest) -> Engine:
    """Opens an engine, blocking. Raises `EngineUnavailable` or `EngineError`."""
    if not is_available(engine):
        raise EngineUnavailable(engine, f"its library is not installed; engines known here: {', '.join(NAMES)}")
    opened: Engine = import_module(_BACKENDS[engine].module).open_engine(request)
    return opened
