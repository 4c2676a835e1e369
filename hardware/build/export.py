"""A torch model to ONNX: factory, checkpoint, export, proof that both compute the same. The build's importer of torch.

Checkpoints are safetensors only: nothing here unpickles. The exporter that traces (``dynamo=False``) is used on
purpose: it writes opset 17, the other one leaves 18 behind whatever it is asked.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.jit._trace import TracerWarning

from common.errors import BuildError, InvalidInput
from common.tensorfile import read_tensors
from common.tensors import Array
from hardware.build.data import Rows
from hardware.build.session import Session
from hardware.build.spec import ModelSpec, Source

OPSET = 17
_PARITY_ROWS = 8
_PARITY = 1e-3  # of the output's largest magnitude; float32 sums in another order differ by far less


def load_module(source: Source, base: Path) -> torch.nn.Module:
    """The factory's module with the checkpoint's parameters, in eval mode. `BuildError` where they do not fit."""
    if source.factory is None or source.checkpoint is None:
        raise BuildError("the source names no torch factory")
    module = _call(source.factory)
    try:
        tensors = read_tensors(base / source.checkpoint)
        module.load_state_dict({name: torch.from_numpy(array) for name, array in tensors.items()}, strict=True)
    except InvalidInput as exc:
        raise BuildError(str(exc)) from exc
    except RuntimeError as exc:
        raise BuildError(f"checkpoint {source.checkpoint} does not fit {source.factory}: {exc}") from exc
    return module.eval()


def export_onnx(module: torch.nn.Module, spec: ModelSpec, rows: Rows, path: Path) -> None:
    """Writes the module as ONNX, opset 17, with every dimension free that the spec leaves free."""
    feeds = next(rows.feeds(2))
    names = [tensor.name for tensor in spec.inputs]
    dynamic = {
        t.name: {i: f"{t.name}_{i}" for i, d in enumerate(t.shape) if d == -1} for t in (*spec.inputs, *spec.outputs)
    }
    for tensor in (*spec.inputs, *spec.outputs):
        dynamic[tensor.name][0] = "batch"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the tracing exporter itself
        warnings.simplefilter("ignore", TracerWarning)  # shapes that the spec fixes become constants
        warnings.filterwarnings("ignore", "Constant folding", UserWarning)  # `simplify` folds what the exporter leaves
        try:
            torch.onnx.export(
                module,
                tuple(torch.from_numpy(feeds[name]) for name in names),
                str(path),
                dynamo=False,
                opset_version=OPSET,
                input_names=names,
                output_names=[tensor.name for tensor in spec.outputs],
                dynamic_axes=dynamic,
            )
        except Exception as exc:  # the exporter raises whatever the module and its own passes raise
            raise BuildError(f"model {spec.name!r} cannot be exported to ONNX: {exc}") from exc


def check_parity(module: torch.nn.Module, path: Path, spec: ModelSpec, rows: Rows) -> float:
    """Largest difference of ONNX to torch over a few rows, of the output's magnitude; `BuildError` over 0.1 %."""
    feeds = next(rows.take(np.arange(min(_PARITY_ROWS, len(rows)))).feeds(_PARITY_ROWS))
    wanted = _run(module, [feeds[tensor.name] for tensor in spec.inputs])
    given = Session(path).run(feeds)
    worst = 0.0
    for tensor, expected in zip(spec.outputs, wanted, strict=True):
        scale = max(float(np.abs(expected).max()), 1e-6)
        worst = max(worst, float(np.abs(given[tensor.name] - expected).max()) / scale)
    if not worst <= _PARITY:
        raise BuildError(
            f"model {spec.name!r}: the exported ONNX differs from torch by {worst:.2%}; accepted: {_PARITY:.1%}"
        )
    return worst


def _run(module: torch.nn.Module, inputs: list[Array]) -> list[Array]:
    with torch.inference_mode():
        result = module(*(torch.from_numpy(array) for array in inputs))
    return [item.numpy() for item in (result if isinstance(result, tuple | list) else [result])]


def _call(factory: str) -> torch.nn.Module:
    place, name = factory.split(":")
    try:
        made = getattr(importlib.import_module(place), name)()
    except (ImportError, AttributeError, TypeError) as exc:
        raise BuildError(f"factory {factory!r} cannot be called: {exc}") from exc
    if not isinstance(made, torch.nn.Module):
        raise BuildError(f"factory {factory!r} made a {type(made).__name__}; accepted: a torch.nn.Module")
    return made
