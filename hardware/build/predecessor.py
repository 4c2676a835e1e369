"""The bundle that a build succeeds: what it left in float, and its variants' files, whose scales may be kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.bundle import Bundle
from common.errors import BuildError
from hardware.build.graph import Graph
from hardware.build.report import read_report
from hardware.build.variants import RECIPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Predecessor:
    float_layers: Mapping[str, tuple[str, ...]]  # by variant
    graphs: Mapping[str, Graph]  # by variant: its file, for each recipe that the bundle has

    @classmethod
    def open(cls, path: Path, model: str) -> Predecessor:
        """Raises `BuildError` where `path` is no bundle that a build wrote, cannot be read, or is of another model."""
        report, bundle = read_report(path), Bundle.open(path)
        for name in {report.model, bundle.spec.model.name} - {model}:
            raise BuildError(
                f"{path} is a bundle of model {name!r}, not {model!r}; accepted: an earlier bundle of the same model"
            )
        files = {one.name: one.files for one in bundle.spec.variants}
        return cls(
            float_layers={one.name: one.float_layers for one in report.variants},
            graphs={
                recipe.name: Graph.load(bundle.file(name), is_checked=False)  # early versions did not sort the nodes
                for recipe in RECIPES
                for name in files.get(recipe.name, {}).get(recipe.engine, ())[:1]
            },
        )
