"""Processes under measurement: started, awaited, read from /proc, ended. Linux only."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.up.layout import toml as written
from common.up.supervisor import end_with_parent

OUTRIDER = (sys.executable, "-m", "common.cli")
_CPUCLOCK_SCHED = 2


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process: CPU seconds so far, resident MB now, threads now."""

    cpu_s: float
    rss_mb: float
    threads: int


def usage(pid: int) -> Usage:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    resident_kb = int(status["VmRSS"].split()[0])
    return Usage(cpu_s(pid), resident_kb / 1024, int(status["Threads"]))


def cpu_s(pid: int) -> float:
    """CPU seconds of another process, all threads it ever had, to the nanosecond (`stat` counts in hundredths)."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)  # clock_getcpuclockid(3), which Python has not


@contextlib.contextmanager
def child(*argv: object, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with this one, and with the context: SIGTERM, then SIGKILL."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            [str(argument) for argument in argv],
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=end_with_parent(),  # noqa: PLW1509 - one system call, nothing of Python's
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def serving(*argv: object, log: Path, timeout_s: float = 120.0) -> Iterator[dict[str, Any]]:
    """A child that writes an endpoint file when it serves; yields what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = Path(folder) / "endpoint.json"
        with child(*argv, "--endpoint-file", endpoint, log=log) as process:
            wait_for(endpoint, process, log, timeout_s)
            yield json.loads(endpoint.read_bytes())


def wait_for(path: Path, process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    """Returns when `path` exists. Raises `RuntimeError` with the end of the log."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} does not serve:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.005)


def toml(folder: Path, name: str, table: Mapping[str, Any]) -> Path:
    """Writes a process's configuration; `models` is a list of tables."""
    text = written({key: value for key, value in table.items() if key != "models"})
    text += "".join(f"\n[[models]]\n{written(model)}" for model in table.get("models", ()))
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path
