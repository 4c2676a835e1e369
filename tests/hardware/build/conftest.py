"""The digits model, prepared and built once for all tests of the builder."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.tensorfile import read_tensors
from hardware.build.build import build
from hardware.build.data import Rows, load_rows
from hardware.build.export import export_onnx, load_module
from hardware.build.graph import Graph, simplify
from hardware.build.layers import Layer, find_layers
from hardware.build.spec import ModelSpec, load_spec


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A folder with model.toml and its spec."""

    folder: Path
    spec: ModelSpec

    def with_gate(self, **changes: object) -> ModelSpec:
        return dataclasses.replace(self.spec, gate=dataclasses.replace(self.spec.gate, **changes))


@dataclass(frozen=True, kw_only=True)
class Fp32:
    """The digits network as the quantizer gets it."""

    onnx: Path
    graph: Graph
    layers: list[Layer]
    calibration: Rows
    heldout: Rows


def _prepared(folder: Path) -> Prepared:
    return Prepared(folder=folder, spec=load_spec(folder / "model.toml"))


@pytest.fixture(scope="session")
def digits_v2(digits_sources: dict[str, Path]) -> Prepared:
    return _prepared(digits_sources["v2"])


@pytest.fixture(scope="session")
def digits_v3(digits_sources: dict[str, Path]) -> Prepared:
    return _prepared(digits_sources["v3"])


@pytest.fixture(scope="session")
def collapsed(digits_sources: dict[str, Path]) -> Prepared:
    return _prepared(digits_sources["collapsed"])


@pytest.fixture(scope="session")
def bundle_v2(digits_v2: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "v2"
    build(digits_v2.spec, digits_v2.folder, out)
    return out


@pytest.fixture(scope="session")
def fp32(digits_v2: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Fp32:
    spec, folder = digits_v2.spec, digits_v2.folder
    calibration, heldout = load_rows(spec, folder)
    path = tmp_path_factory.mktemp("fp32") / "model.onnx"
    export_onnx(load_module(spec.source, folder), spec, heldout, path)
    graph = simplify(path)
    layers = find_layers(graph, heldout)
    return Fp32(onnx=path, graph=graph, layers=layers, calibration=calibration, heldout=heldout)


@pytest.fixture
def arrays(digits_v2: Prepared) -> dict[str, object]:
    return dict(read_tensors(digits_v2.folder / "checkpoint.safetensors"))
