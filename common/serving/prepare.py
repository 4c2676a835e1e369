"""From a request's tensors to an engine's inputs, and from its outputs to the answer's tensors.

Owns the check of a request against the model's config, the picture pipeline at serving time, requested outputs and the
classification extension (BYTES [rows, k] of ``value:index:label``, best first, as Triton renders it; the value is the
probability that the model's config declares).
"""

from __future__ import annotations

import numpy as np

from common.bundle import ModelConfig
from common.errors import InvalidInput, OutsideProfile
from common.images import prepare as prepare_image
from common.request import IMAGE, Request
from common.serving.slot import LoadedEngine
from common.tensors import BYTES, Array, Tensors, TensorSpec, datatype_of, widened


def rows_of(request: Request) -> int:
    """The batch: every input's first dimension. Raises `InvalidInput` where inputs disagree or have no rows."""
    rows = -1
    for name, array in request.inputs.items():
        if array.ndim == 0 or array.shape[0] == 0:
            raise InvalidInput(
                f"inputs[{name!r}].shape", f"{list(array.shape)} has no rows", "a first dimension of at least 1"
            )
        if rows not in (-1, array.shape[0]):
            raise InvalidInput(
                f"inputs[{name!r}].shape",
                f"{array.shape[0]} rows where another input has {rows}",
                "equal first dimensions",
            )
        rows = array.shape[0]
    if rows == -1:
        raise InvalidInput("inputs", "the request has none", "at least one input tensor")
    return rows


def has_pictures(request: Request, config: ModelConfig) -> bool:
    """Whether decoding is needed, which takes milliseconds and so does not belong on the event loop."""
    return config.image is not None and any(datatype_of(array) == BYTES for array in request.inputs.values())


def check(request: Request, config: ModelConfig) -> None:
    """Raises `InvalidInput` for what is wrong for any target, `OutsideProfile` for what a larger one might take."""
    rows = rows_of(request)
    if not has_pictures(request, config):
        _check_tensors(request.inputs, config)
    else:
        _picture_input(request, config)
    known = [spec.name for spec in config.outputs]
    for name in request.outputs:
        if name not in known:
            raise InvalidInput("outputs", f"model {config.name!r} has no output {name!r}", ", ".join(known))
    if request.classes:
        _check_classes(request, config)
    if rows > config.max_batch:
        raise OutsideProfile(config.name, f"{rows} rows in one request", f"at most {config.max_batch}")


def engine_inputs(request: Request, config: ModelConfig) -> Tensors:
    """What the engine gets: the request's tensors under the model's names, pictures decoded."""
    if not has_pictures(request, config):
        return request.inputs
    name, pictures = _picture_input(request, config)
    assert config.image is not None
    rows = [prepare_image(data, config.image, f"inputs[{name!r}][{i}]") for i, data in enumerate(pictures.ravel())]
    return {config.inputs[0].name: np.concatenate(rows)}


def answer_tensors(outputs: Tensors, request: Request, loaded: LoadedEngine) -> Tensors:
    """The outputs that the caller asked for, in the order of the request (all, in the model's order, by default)."""
    config = loaded.config
    names = request.outputs or loaded.accepts.outputs
    if not request.classes:
        return {name: outputs[name] for name in names}
    scored = config.outputs[0].name
    return {
        name: _best_classes(outputs[name], request.classes, loaded) if name == scored else outputs[name]
        for name in names
    }


def posterior(scores: Array, config: ModelConfig) -> Array:
    """Class probabilities, [rows, classes] float32, as the config declares them to follow from the first output."""
    flat = widened(scores).reshape(scores.shape[0], -1).astype(np.float32)
    if config.posterior == "identity":
        return flat
    shifted = np.exp(flat - flat.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))


def _best_classes(scores: Array, count: int, loaded: LoadedEngine) -> Array:
    probabilities = posterior(scores, loaded.config)
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :count]
    out = np.empty(best.shape, dtype=object)
    for row, column in np.ndindex(best.shape):
        index = int(best[row, column])
        label = f":{loaded.labels[index]}" if index < len(loaded.labels) else ""
        out[row, column] = f"{probabilities[row, index]:.6f}:{index}{label}".encode()
    return out


def _picture_input(request: Request, config: ModelConfig) -> tuple[str, Array]:
    declared = config.inputs[0].name
    name = next(iter(request.inputs))
    if len(request.inputs) != 1 or name not in (IMAGE, declared):
        raise InvalidInput(
            "inputs", f"pictures as {', '.join(request.inputs)}", f"one BYTES input named {IMAGE!r} or {declared!r}"
        )
    array = request.inputs[name]
    if array.ndim not in (1, 2) or array.size != array.shape[0]:
        raise InvalidInput(f"inputs[{name!r}].shape", f"{list(array.shape)}", "[n] or [n, 1], one encoded picture each")
    return name, array


def _check_tensors(inputs: Tensors, config: ModelConfig) -> None:
    declared = {spec.name: spec for spec in config.inputs}
    for name in inputs:
        if name not in declared:
            raise InvalidInput("inputs", f"model {config.name!r} has no input {name!r}", _takes(config))
    for name, spec in declared.items():
        if name not in inputs:
            raise InvalidInput("inputs", f"input {name!r} of model {config.name!r} is missing", _takes(config))
        array = inputs[name]
        if datatype_of(array) != spec.datatype:
            raise InvalidInput(f"inputs[{name!r}].datatype", datatype_of(array), spec.datatype)
        if array.ndim != len(spec.shape):
            raise InvalidInput(f"inputs[{name!r}].shape", f"{list(array.shape)}", _describe(spec))
        if not spec.matches(array.shape):
            raise OutsideProfile(config.name, f"input {name!r} has shape {list(array.shape)}", _describe(spec))


def _check_classes(request: Request, config: ModelConfig) -> None:
    if request.classes < 0 or config.task != "classification":
        problem = f"{request.classes} classes of model {config.name!r}, a {config.task} model"
        raise InvalidInput("outputs.classification", problem, "a count of at least 1, of a classification model")
    scored = config.outputs[0].name
    if set(request.outputs) - {scored}:
        raise InvalidInput("outputs.classification", f"classes of {', '.join(request.outputs)}", f"of {scored} alone")


def _takes(config: ModelConfig) -> str:
    return ", ".join(_describe(spec) for spec in config.inputs)


def _describe(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.datatype} {list(spec.shape)}"
