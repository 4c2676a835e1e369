"""What the tests of the node have in common."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _patient_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy with other things a look-up may take long; here it must not be given up."""
    monkeypatch.setattr("edge.disk_cache.PATIENCE_S", 10.0)
