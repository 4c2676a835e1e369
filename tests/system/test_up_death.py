"""Any process may die under load: the others go on, the client sees no failed call, the dead one returns as it was.

The last file of this folder: it makes a release, which other tests do not expect, and its last test ends the system.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.soak.kills import Killer
from tests.soak.load import Load
from tests.soak.pushes import Pushes
from tests.system.running import NAMES, Up, is_alive, outrider

pytestmark = pytest.mark.system

RATE = 25.0  # calls per second: what is left of the machine starts processes


def post(url: str, body: bytes, kind: str = "application/json") -> tuple[int, dict[str, str]]:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": kind}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return int(reply.status), {key.lower(): value for key, value in reply.headers.items()}
    except urllib.error.HTTPError as exc:
        return exc.code, {key.lower(): value for key, value in exc.headers.items()}


def digit(rows: int) -> bytes:
    pixels = [random.random() for _ in range(64 * rows)]
    return json.dumps(
        {"inputs": [{"name": "pixels", "datatype": "FP32", "shape": [rows, 1, 8, 8], "data": pixels}]}
    ).encode()


def metrics(base: str) -> str:
    with urllib.request.urlopen(f"{base}/metrics") as response:
        return str(response.read().decode())


async def test_processes_are_killed_under_load_and_no_call_fails(up: Up) -> None:
    """A worker, a node meanwhile; then service and broker while a release is made, which arrives all the same."""
    pushes, killer = Pushes(up), Killer(up, random.Random(1))
    pushes.prepare(("v2",))
    async with Load(up, RATE) as load:
        pid = {name: process["pid"] for name, process in up.processes().items()}
        worker = asyncio.create_task(killer.kill(pid["worker-1"], "worker-1"))
        await killer.kill(pid["edge-a"], "edge-a")
        text = await asyncio.to_thread(metrics, up.http("edge-a"))
        both = asyncio.gather(killer.kill(pid["broker"], "broker"), killer.kill(pid["sync"], "sync"))
        await pushes.push("v2")
        await asyncio.gather(both, worker)
        await pushes.until_served()
    assert not [*killer.problems, *pushes.problems]
    assert not load.seen.problems(), (load.seen, up.log.read_text())
    assert load.seen.calls > 50
    assert 'outrider_sync_installs_total{model="efficientnet-lite0",source="disk"} 1.0' in text
    assert "outrider_sync_fetched_bytes_total{" not in text


async def test_without_a_gateway_the_edge_serves_and_what_needs_the_cloud_is_told_to_come_back(up: Up) -> None:
    """edge-b takes 4 rows of digits at once; 8 are the cloud's."""
    url, pid = f"{up.http('edge-b')}/v2/models/digits/infer", up.processes()["gateway"]["pid"]
    deadline, refused = time.monotonic() + 60, 0
    async with Load(up, RATE) as load:
        os.kill(pid, signal.SIGKILL)
        while not refused or (await asyncio.to_thread(post, url, digit(8)))[0] != 200:
            assert time.monotonic() < deadline, up.log.read_text()
            assert (await asyncio.to_thread(post, url, digit(1)))[0] == 200
            status, headers = await asyncio.to_thread(post, url, digit(8))
            assert status in (200, 503)
            if status == 503:
                refused += 1
                assert int(headers["retry-after"]) >= 1
    assert not load.seen.problems(), (load.seen, up.log.read_text())


async def test_sigterm_says_not_ready_at_once_answers_on_and_exits_zero(up: Up) -> None:
    base, pid = up.http("edge-b"), up.processes()["edge-b"]["pid"]

    def ready() -> int:
        try:
            with urllib.request.urlopen(f"{base}/v2/health/ready", timeout=5) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as exc:
            return exc.code

    assert await asyncio.to_thread(ready) == 200
    before = up.log.read_text().count("edge-b ended with exit code 0")
    os.kill(pid, signal.SIGTERM)
    started = time.monotonic()
    while await asyncio.to_thread(ready) == 200:
        assert time.monotonic() - started < 5
    assert (await asyncio.to_thread(post, f"{base}/v2/models/digits/infer", digit(1)))[0] == 200
    while up.processes()["edge-b"].get("pid") in (pid, None):
        assert time.monotonic() - started < 60, up.log.read_text()
        await asyncio.sleep(0.05)
    assert up.log.read_text().count("edge-b ended with exit code 0") == before + 1


def test_up_killed_takes_all_along_and_the_next_start_is_clean_quick_and_downloads_nothing(up: Up) -> None:
    """The last test of this folder: it ends the system that the others use."""
    children = up.children()
    assert set(children.values()) == set(NAMES)
    os.kill(up.process.pid, signal.SIGKILL)
    up.process.wait()
    deadline = time.monotonic() + 5
    while left := [name for pid, name in children.items() if is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    assert not up.left_over()
    built = files_of(up.bundles)
    up.start(timeout_s=60)
    assert files_of(up.bundles) == built
    assert outrider("status", "--state", up.state).returncode == 0
    for name in ("edge-a", "edge-b", "worker-1", "worker-2"):
        assert "outrider_sync_fetched_bytes_total{" not in metrics(up.http(name))
    assert up.stop(signal.SIGTERM) == 0
    assert not up.endpoints.exists()


def files_of(bundles: Path) -> dict[Path, int]:
    """When each was written. Not `latest`: other systems publish from the same folder."""
    return {path: path.stat().st_mtime_ns for path in bundles.rglob("*") if path.is_file() and path.name != "latest"}
