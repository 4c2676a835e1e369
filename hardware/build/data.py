"""The rows that a build works on: calibration and held-out inputs, and the promise that they share none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import BuildError, CalibrationMissing, InvalidInput
from common.images import ImagePipeline, normalize
from common.tensorfile import read_tensors
from common.tensors import Array, TensorSpec, datatype_of
from hardware.build.spec import ModelSpec

_EXTRAS = ("labels", "groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Inputs by name as they lie in the file (pixels for image models), with labels and groups where known."""

    inputs: dict[str, Array]
    labels: Array | None
    groups: Array | None
    image_input: str | None
    image: ImagePipeline | None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def take(self, index: Array) -> Rows:
        return Rows(
            inputs={name: array[index] for name, array in self.inputs.items()},
            labels=None if self.labels is None else self.labels[index],
            groups=None if self.groups is None else self.groups[index],
            image_input=self.image_input,
            image=self.image,
        )

    def feeds(self, batch: int) -> Iterator[dict[str, Array]]:
        """The model's own inputs, `batch` rows at a time."""
        for start in range(0, len(self), batch):
            yield {name: self._ready(name, array[start : start + batch]) for name, array in self.inputs.items()}

    def digests(self) -> list[bytes]:
        """One digest per row over all its inputs."""
        arrays = [np.ascontiguousarray(self.inputs[name]) for name in sorted(self.inputs)]
        return [
            hashlib.blake2b(b"".join(a[i].tobytes() for a in arrays), digest_size=16).digest() for i in range(len(self))
        ]

    def _ready(self, name: str, array: Array) -> Array:
        return normalize(array, self.image) if self.image is not None and name == self.image_input else array


def load_rows(spec: ModelSpec, base: Path) -> tuple[Rows, Rows]:
    """(calibration, held-out). Raises `CalibrationMissing`, or `BuildError` for bad files and for a shared row."""
    if spec.calibration is None:
        raise CalibrationMissing(spec.name)
    calibration = _read(spec, base / spec.calibration.file)
    holdout = _read(spec, base / spec.holdout.file)
    _refuse_leak(spec.name, calibration, holdout)
    return calibration, holdout


def _read(spec: ModelSpec, path: Path) -> Rows:
    try:
        arrays = read_tensors(path)
    except InvalidInput as exc:
        raise BuildError(str(exc)) from exc
    names = [tensor.name for tensor in spec.inputs]
    unknown = sorted(set(arrays) - set(names) - set(_EXTRAS))
    missing = sorted(set(names) - set(arrays))
    if unknown or missing:
        raise BuildError(f"{path}: arrays {sorted(arrays)} do not match the model's inputs {names}")
    rows = {len(array) for array in arrays.values()}
    if len(rows) != 1 or rows == {0}:
        raise BuildError(f"{path}: its arrays have {sorted(rows)} rows; accepted: the same number, at least 1")
    image_input = names[0] if spec.image is not None else None
    for tensor in spec.inputs:
        _check_input(path, tensor, arrays[tensor.name], spec.image if tensor.name == image_input else None)
    _check_extras(spec, path, arrays)
    return Rows(
        inputs={name: arrays[name] for name in names},
        labels=arrays.get("labels"),
        groups=arrays.get("groups"),
        image_input=image_input,
        image=spec.image,
    )


def _check_input(path: Path, tensor: TensorSpec, array: Array, image: ImagePipeline | None) -> None:
    if image is not None:
        planes = 3 if image.channels == "RGB" else 1
        if array.dtype != np.uint8 or array.shape[1:] != (image.crop, image.crop, planes):
            raise BuildError(
                f"{path}: {tensor.name!r} is {array.dtype} {list(array.shape)}; accepted: uint8 pixels after crop, "
                f"[rows, {image.crop}, {image.crop}, {planes}]"
            )
    elif datatype_of(array) != tensor.datatype or not tensor.matches(array.shape):
        raise BuildError(
            f"{path}: {tensor.name!r} is {datatype_of(array)} {list(array.shape)}; "
            f"accepted: {tensor.datatype} {list(tensor.shape)}"
        )
    elif array.dtype.kind == "f" and not (finite := np.isfinite(array.reshape(len(array), -1)).all(axis=1)).all():
        raise BuildError(f"{path}: row {int(np.argmin(finite))} of {tensor.name!r} is not finite")


def _check_extras(spec: ModelSpec, path: Path, arrays: dict[str, Array]) -> None:
    """Labels and groups are one integer per row; labels are classes of the first output."""
    for name in _EXTRAS:
        array = arrays.get(name)
        if array is not None and (array.ndim != 1 or array.dtype.kind not in "iu"):
            raise BuildError(f"{path}: {name!r} is {array.dtype} {list(array.shape)}; accepted: integers [rows]")
    labels, classes = arrays.get("labels"), spec.outputs[0].shape[-1]
    if labels is not None and (labels.min() < 0 or (classes != -1 and labels.max() >= classes)):
        raise BuildError(f"{path}: labels reach from {labels.min()} to {labels.max()}; accepted: 0..{classes - 1}")


def _refuse_leak(model: str, calibration: Rows, holdout: Rows) -> None:
    seen = set(calibration.digests())
    shared = [i for i, digest in enumerate(holdout.digests()) if digest in seen]
    if shared:
        raise BuildError(
            f"model {model!r}: {len(shared)} held-out rows are also calibration rows (first: row {shared[0]}); "
            "the gate must judge on inputs that the build has not seen"
        )
