"""`outrider up` and `outrider status`: ready, told where, refused where another runs."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.system.running import NAMES, Up, outrider

pytestmark = pytest.mark.system


def metrics(base: str) -> str:
    with urllib.request.urlopen(f"{base}/metrics") as response:
        return str(response.read().decode())


def status(up: Up) -> dict[str, Any]:
    done = outrider("status", "--json", "--state", up.state)
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_status_names_every_process_and_what_it_serves(up: Up) -> None:
    found = status(up)
    assert found["is_ready"]
    by_name = {process["name"]: process for process in found["processes"]}
    assert list(by_name) == NAMES
    assert sorted(by_name["edge-a"]["serves"]) == ["digits", "efficientnet-lite0"]
    assert sorted(by_name["edge-b"]["serves"]) == ["digits"]
    assert by_name["gateway"]["serves"]["digits"]["version"] == "1"
    text = outrider("status", "--state", up.state).stdout
    assert all(name in text for name in NAMES)


def test_every_serving_process_has_metrics(up: Up) -> None:
    for name in ("gateway", "worker-1", "worker-2", "edge-a", "edge-b"):
        assert "process_resident_memory_bytes" in metrics(up.http(name))
    assert 'outrider_sync_active_version{model="digits"} 1.0' in metrics(up.http("edge-b"))


def test_a_second_up_on_the_same_state_is_refused(up: Up) -> None:
    done = outrider("up", "--state", up.state, "--base-port", "0")
    assert done.returncode == 2
    assert "another `outrider up` runs in" in done.stderr


def test_a_port_in_use_is_named(up: Up, tmp_path: Path) -> None:
    port = int(up.http("gateway").rpartition(":")[2])
    done = outrider("up", "--state", tmp_path, "--base-port", port)
    assert done.returncode == 2
    assert f"port {port} (gateway.http) is in use" in done.stderr


def test_a_first_release_that_cannot_be_made_is_one_plain_error(tmp_path: Path) -> None:
    for source in ("digits-v1", "efficientnet-lite0-v1"):
        (tmp_path / "sources" / source).mkdir(parents=True)
        (tmp_path / "sources" / source / "model.toml").write_text("nonsense")
    done = outrider("up", "--state", tmp_path / "state", "--bundles", tmp_path, "--base-port", "0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "model.toml" in done.stderr


def test_status_without_a_system_says_so(tmp_path: Path) -> None:
    done = outrider("status", "--state", tmp_path)
    assert done.returncode == 2
    assert "no system runs in" in done.stderr
