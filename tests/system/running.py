"""`outrider up` in a process of its own, as a user starts it: for the tests of this folder and for the soak.

Owns the start, the end, and which processes there are: what the kernel knows, not what endpoints.json says.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.up.supervisor import end_with_parent

OUTRIDER = (sys.executable, "-m", "common.cli")
BUILD_S = 240.0
NAMES = ["broker", "sync", "worker-1", "worker-2", "gateway", "edge-a", "edge-b"]


@dataclass
class Up:
    """One `outrider up`. `flags` go to the command, `environment` beside this process's own."""

    state: Path
    bundles: Path
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_s: float = 0.0
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self, timeout_s: float = BUILD_S) -> None:
        command = (*OUTRIDER, "up", "--state", self.state, "--bundles", self.bundles, "--base-port", "0", *self.flags)
        started = time.monotonic()
        self.state.parent.mkdir(parents=True, exist_ok=True)
        self.endpoints.unlink(missing_ok=True)  # of an `up` that was killed
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent(),  # noqa: PLW1509  # a test run that is killed leaves nothing
                env={**os.environ, **self.environment},
            )
        while not self.endpoints.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() - started < timeout_s, self.log.read_text()
            time.sleep(0.05)
        self.ready_s = time.monotonic() - started

    def stop(self, number: int = signal.SIGINT, timeout_s: float = 60.0) -> int:
        """Its exit code; asserts that no process of it is left."""
        pids = self.children()
        self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        assert not [pid for pid in pids if is_alive(pid)]
        assert not self.left_over()
        return code

    @property
    def log(self) -> Path:
        return self.state.parent / f"{self.state.name}.log"

    @property
    def endpoints(self) -> Path:
        return self.state / "endpoints.json"

    def processes(self) -> dict[str, dict[str, Any]]:
        entries = json.loads(self.endpoints.read_bytes())["processes"]
        return {entry["name"]: entry for entry in entries}

    def http(self, name: str) -> str:
        return str(self.processes()[name]["http"])

    def grpc(self, name: str) -> str:
        return str(self.processes()[name]["grpc"])

    def children(self) -> dict[int, str]:
        """Every process below `up` now: pid -> name (its endpoint file's, or its command)."""
        found: dict[int, str] = {}
        running, parents = _running(), {self.process.pid}
        while parents:
            born = {pid: _name(command) for pid, parent, command in running if parent in parents}
            found |= born
            parents = set(born)
        return found

    def left_over(self) -> list[str]:
        """Processes whose command names this state folder or a file in it: none once `up` has ended."""
        within = (str(self.state), f"{self.state}{os.sep}")
        return [
            f"{pid}: {' '.join(command)}"
            for pid, _, command in _running()
            if any(word == within[0] or word.startswith(within[1]) for word in command)
        ]


def _running() -> list[tuple[int, int, list[str]]]:
    """(pid, parent, command) of every process that has not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # gone meanwhile
                continue
            if state not in "ZX":
                found.append((int(entry.name), int(parent), command))
    return found


def _name(command: list[str]) -> str:
    told = [Path(word).stem for word in command if word.endswith(".json") and "/run/" in word]
    return told[0] if told else " ".join(command[-4:])


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def outrider(*arguments: object, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (*OUTRIDER, *map(str, arguments)), capture_output=True, text=True, timeout=timeout_s, check=False
    )
