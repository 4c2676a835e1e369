"""`outrider up` and `outrider status`: ready, told where, mended after a death, stopped without a trace."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import Up, outrider

pytestmark = pytest.mark.system

NAMES = ["broker", "sync", "worker-1", "worker-2", "gateway", "edge-a", "edge-b"]


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


def test_a_killed_process_comes_back_with_what_it_had_and_fetches_nothing(up: Up) -> None:
    pid = up.processes()["edge-b"]["pid"]
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while up.processes()["edge-b"].get("pid") in (pid, None) or not status(up)["is_ready"]:
        assert time.monotonic() < deadline, up.log.read_text()
        time.sleep(0.1)
    text = metrics(up.http("edge-b"))
    assert 'outrider_sync_installs_total{model="digits",source="disk"} 1.0' in text
    assert "outrider_sync_fetched_bytes_total{" not in text


def test_a_second_up_on_the_same_state_is_refused(up: Up) -> None:
    done = outrider("up", "--state", up.state, "--base-port", "0")
    assert done.returncode == 1
    assert "another `outrider up` runs in" in done.stderr


def test_a_port_in_use_is_named(up: Up, tmp_path: Path) -> None:
    port = int(up.http("gateway").rpartition(":")[2])
    done = outrider("up", "--state", tmp_path, "--base-port", port)
    assert done.returncode == 1
    assert f"port {port} (gateway.http) is in use" in done.stderr


def test_status_without_a_system_says_so(tmp_path: Path) -> None:
    done = outrider("status", "--state", tmp_path)
    assert done.returncode == 1
    assert "no system runs in" in done.stderr


def test_a_second_start_builds_and_downloads_nothing_and_is_quick(up: Up) -> None:
    """The last test of this folder: it stops the system that the others use."""
    assert up.stop(signal.SIGINT) == 0
    assert not (up.state / "endpoints.json").exists()
    built = {path: path.stat().st_mtime_ns for path in up.bundles.rglob("*")}
    up.start(timeout_s=60)
    assert {path: path.stat().st_mtime_ns for path in up.bundles.rglob("*")} == built
    for name in ("edge-a", "edge-b", "worker-1", "worker-2"):
        assert "outrider_sync_fetched_bytes_total{" not in metrics(up.http(name))
    assert up.stop(signal.SIGTERM) == 0
