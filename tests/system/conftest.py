"""The whole system as processes, started as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Built

OUTRIDER = (sys.executable, "-m", "common.cli")
BUILD_S = 240.0


@dataclass
class Up:
    """One `outrider up` in a process of its own."""

    state: Path
    bundles: Path
    ready_s: float = 0.0
    _process: subprocess.Popen[bytes] = field(init=False)

    def start(self, timeout_s: float = BUILD_S) -> None:
        command = (*OUTRIDER, "up", "--state", self.state, "--bundles", self.bundles, "--base-port", "0")
        started = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        while not (self.state / "endpoints.json").exists():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() - started < timeout_s, self.log.read_text()
            time.sleep(0.05)
        self.ready_s = time.monotonic() - started

    def stop(self, number: int = signal.SIGINT, timeout_s: float = 60.0) -> int:
        """Its exit code; asserts that no process of it is left."""
        pids = [process["pid"] for process in self.processes().values()]
        self._process.send_signal(number)
        code = self._process.wait(timeout_s)
        assert not [pid for pid in pids if is_alive(pid)]
        return code

    @property
    def log(self) -> Path:
        return self.state.parent / f"{self.state.name}.log"

    def processes(self) -> dict[str, dict[str, Any]]:
        entries = json.loads((self.state / "endpoints.json").read_bytes())["processes"]
        return {entry["name"]: entry for entry in entries}

    def http(self, name: str) -> str:
        return str(self.processes()[name]["http"])

    def grpc(self, name: str) -> str:
        return str(self.processes()[name]["grpc"])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def outrider(*arguments: object, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (*OUTRIDER, *map(str, arguments)), capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.fixture(scope="package")
def up(bundles: Path, photos: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    one = Up(tmp_path_factory.mktemp("system") / "state", bundles)
    one.start()
    yield one
    if one._process.poll() is None:
        one.stop()


@pytest.fixture(scope="session")
def photo(photos: Built) -> Path:
    """A picture of a cat."""
    return photos.source / "photos" / "chelsea.png"
