from __future__ import annotations

from pathlib import Path

import pytest

from sync.pki.authority import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca")
