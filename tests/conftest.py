"""Fixtures that several folders share: what takes long to make is made once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_balancer_to_notify() -> Iterator[None]:
    """Nodes and gateways that tests run in this process end at once; those in processes of their own give notice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.serving.lifetime.NOTICE_S", 0.0)
        yield


@dataclass(frozen=True)
class Built:
    """A model's source folder and the bundle that was built from it."""

    source: Path
    bundle: Path


@pytest.fixture(scope="session")
def digits_sources(bundles: Path) -> dict[str, Path]:
    """What a user would bring for `digits` at each stage: model.toml, checkpoint, data. Copy a folder to change it."""
    from hardware.demo.digits import STAGES
    from hardware.demo.prepare import prepare_stages

    folders = {stage: bundles / "sources" / f"digits-{stage}" for stage in STAGES}
    prepare_stages("digits", bundles / "sources", STAGES, progress=lambda _line: None)
    return dict(folders)


@pytest.fixture(scope="session")
def digits_source(digits_sources: dict[str, Path]) -> Path:
    return digits_sources["v1"]


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`outrider up --bundles` of this run: sources and bundles of every system that it starts.

    OUTRIDER_TEST_BUNDLES names a folder to keep between runs, for whoever works on these tests.
    """
    kept = os.environ.get("OUTRIDER_TEST_BUNDLES")
    return Path(kept) if kept else tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="session")
def photos(bundles: Path) -> Built:
    """EfficientNet-Lite0 with its real weights, built in full into `bundles`, where `outrider up` will find it."""
    from cloud.publish import bundle_of, source_digest
    from hardware.demo.prepare import prepare

    source = bundles / "sources" / "efficientnet-lite0-v1"
    if not (source / "model.toml").exists():
        prepare("efficientnet-lite0", source, progress=lambda _line: None)
    spec = source / "model.toml"
    bundle = bundle_of(spec, source_digest(spec), bundles / "bundles", skip_gate=False, say=lambda _line: None)
    return Built(source=source, bundle=bundle)
