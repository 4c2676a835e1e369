from __future__ import annotations

from pathlib import Path

import pytest

from tests.sync.fakes import FakeInstaller, World


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here cuts the power: waiting for the disk would prove nothing. Those about fsync put in their own."""
    monkeypatch.setattr("os.fsync", lambda fd: None)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def installer() -> FakeInstaller:
    return FakeInstaller()
