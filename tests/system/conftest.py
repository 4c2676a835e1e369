"""The whole system as processes, started as a user starts it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Built
from tests.system.running import BUILD_S, Up, is_alive, outrider

__all__ = ["BUILD_S", "Up", "is_alive", "outrider"]


@pytest.fixture(scope="package")
def up(bundles: Path, photos: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    one = Up(tmp_path_factory.mktemp("system") / "state", bundles)
    one.start()
    yield one
    if one.process.poll() is None:
        one.stop()


@pytest.fixture(scope="session")
def photo(photos: Built) -> Path:
    """A picture of a cat."""
    return photos.source / "photos" / "chelsea.png"
