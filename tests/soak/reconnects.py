"""Connections that break, one after another: what each of them needed (channel, thread, sockets) goes with it.

One client, thousands of connections; its memory, threads, open files and channels after a warm-up and at the end are
compared. Service and link are a process of their own (`python -m tests.soak.reconnects`).
"""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import grpc

from common.errors import FetchError
from sync.agent.client import GrpcSource
from sync.agent.ports import Range
from sync.service import ServiceConfig
from sync.store import Store
from tests.soak.cuts import cutter
from tests.soak.result import Result
from tests.sync.fakes import running

MOST_KIB: Final = 2 << 10  # that 9,000 connections may leave: a quarter of a KiB each
BYTES: Final = 200_000
ID: Final = "dd" * 32
WHOLE: Final = Range(name=f"objects/{ID[:2]}/{ID}.full", limit=BYTES)


def run(*, count: int = 10_000) -> Result:
    command = (sys.executable, "-m", __name__, str(count))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        source = GrpcSource(child.stdout.readline().strip(), timeout_s=20.0)
        started = time.monotonic()
        broken = breaks(source, count // 10)
        warm = held()
        broken += breaks(source, count - count // 10)
        seconds, end = time.monotonic() - started, held()
        source.close()
    problems = [] if broken == count else [f"only {broken} of {count} connections broke"]
    problems += [
        f"{name} went from {warm[name]} to {end[name]}"
        for name in warm
        if end[name] > warm[name] + (MOST_KIB if name == "kib" else 0)
    ]
    says = f"{broken} connections broke in {seconds:.0f} s; the client has {warm['kib']} KiB, at the end {end['kib']}"
    return Result(part="reconnects", says=says, problems=problems, figures={"warm": warm, "end": end})


def breaks(source: GrpcSource, count: int) -> int:
    """How many of `count` calls broke off."""
    broken = 0
    for _ in range(count):
        try:
            list(source.fetch([WHOLE]))
        except FetchError:
            broken += 1
    return broken


def held() -> dict[str, int]:
    """What this process has."""
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "kib": next(int(line.split()[1]) for line in status if line.startswith("VmRSS")),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "channels": sum(issubclass(type(one), grpc.Channel) for one in gc.get_objects()),
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="outrider-reconnects-") as folder:
        Store(Path(folder)).put_full(ID, bytes(BYTES))
        with running(ServiceConfig(store=folder)) as address, cutter(address) as link:
            link.arm(int(sys.argv[1]), BYTES / 2, random.Random(0))
            print(link.address, flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main()
