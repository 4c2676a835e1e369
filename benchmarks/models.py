"""The demo models of the benchmarks, built once into `--bundles` as `outrider up --bundles` would build them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from cloud.publish import bundle_of, source_digest
from common.up.demo import DIGITS, PHOTOS
from hardware.demo.digits import Stage
from hardware.demo.prepare import prepare, prepare_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    source: Path  # model.toml, checkpoint, data; `photos/` for the image model
    bundle: Path


def photos(bundles: Path) -> Model:
    """EfficientNet-Lite0 with its ImageNet weights: about a minute to build."""
    source = bundles / "sources" / PHOTOS.source
    if not (source / "model.toml").exists():
        prepare(PHOTOS.name, source, progress=_say)
    return _built(PHOTOS.name, source, bundles)


def digits(bundles: Path, *stages: Stage) -> list[Model]:
    sources = [bundles / "sources" / f"{DIGITS.name}-{stage}" for stage in stages]
    if not all((source / "model.toml").exists() for source in sources):
        prepare_stages(DIGITS.name, bundles / "sources", stages, progress=_say)
    return [_built(DIGITS.name, source, bundles) for source in sources]


def _built(name: str, source: Path, bundles: Path) -> Model:
    spec = source / "model.toml"
    bundle = bundle_of(spec, source_digest(spec), bundles / "bundles", skip_gate=False, say=_say)
    return Model(name=name, source=source, bundle=bundle)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
