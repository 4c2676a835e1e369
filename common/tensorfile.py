"""Named arrays in a file: safetensors, the format without code in it. The only importer of its numpy side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from common.errors import InvalidInput
from common.tensors import Array

_ACCEPTED = "a .safetensors file"
_PICKLED = (b"PK\x03\x04", *(bytes((0x80, protocol)) for protocol in range(2, 6)))  # torch.save's zip, bare pickles


def read_tensors(path: Path) -> dict[str, Array]:
    """All arrays of a safetensors file. Raises `InvalidInput` when it is missing or not one."""
    try:
        with path.open("rb") as file:
            head = file.read(9)
            if head.startswith(_PICKLED) and head[8:] != b"{":  # a safetensors header may be as long as that reads
                raise InvalidInput(str(path), "a pickled checkpoint, which can run code and is not opened", _ACCEPTED)
        return dict(load_file(path))
    except (OSError, SafetensorError, AttributeError, TypeError, ValueError) as exc:  # numpy lacks some of its types
        raise InvalidInput(str(path), f"cannot be read as safetensors: {exc}", _ACCEPTED) from exc


def write_tensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Writes arrays (any order and stride) under their names; the bytes depend on the content alone."""
    arrays: dict[str, np.ndarray[Any, Any]] = {name: np.asarray(tensors[name], order="C") for name in sorted(tensors)}
    save_file(arrays, path)
