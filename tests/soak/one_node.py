"""One whole node as a device runs it (`outrider edge run`, its agent inside) and another process that releases to it.

The model `linear` is a real one: the answer tells which version gave it. `echo` runs on the `synthetic` engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from common.tensorfile import write_tensors
from common.tensors import Array
from edge.client import AsyncClient
from tests.bundles import WEIGHT, forward, write_bundle
from tests.system.running import OUTRIDER

LINEAR, ECHO = "linear", "echo"
START_S = 30.0
X = np.array([[1.0, 2.0]], np.float32)


# Ends with the thread that starts it: a run that is killed leaves nothing. Not by fork and a function before exec, as
# gRPC's threads in this process do not bear a fork.
_BOUND = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); os.execv(sys.argv[1], sys.argv[1:])"
)


def bound(*arguments: object) -> tuple[str, ...]:
    """The command of an `outrider` that ends with the thread that starts it."""
    return (sys.executable, "-c", _BOUND, *OUTRIDER, *map(str, arguments))


def answer_of(version: str) -> Array:
    """What version N of `linear` answers to `X`: each has N times the first one's weights."""
    return forward(X, int(version) * WEIGHT)


class Releases:
    """A sync service and its publisher in a process of their own: what they compute takes nothing from the load's loop.

    A context. `release` answers once the version can be fetched.
    """

    def __init__(self, folder: Path, *, model: str = LINEAR, broker: str | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_publish, args=(folder, model, broker, theirs), daemon=True)

    def __enter__(self) -> Releases:
        self._process.start()
        self.address, self.root = self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send("end")
        self._process.join(20)
        self._process.kill()

    def release(self) -> str:
        self._pipe.send("release")
        return str(self._pipe.recv())


def _publish(folder: Path, model: str, broker: str | None, pipe: Connection) -> None:
    from sync.service import ServiceConfig
    from tests.sync.fakes import World, running

    os.nice(5)  # it plays another machine
    world = World(folder)
    with running(ServiceConfig(store=str(world.store.root), broker=broker)) as address:
        pipe.send((address, str(world.root)))
        number = 0
        while pipe.recv() == "release":
            number += 1
            pipe.send(world.publisher.publish(_bundle(folder / "next", model, number)).version)


def _bundle(folder: Path, model: str, number: int) -> Path:
    if model == LINEAR:
        return write_bundle(folder, weight=number * WEIGHT)
    from hardware.build.echo import write_echo

    write_echo(folder, name=ECHO)
    rows = np.random.default_rng(number).random((2, 16), dtype=np.float32) + 1
    write_tensors(folder / "golden.safetensors", {"input.x": rows, "output.y": rows})
    return folder


@dataclass
class OneNode:
    """A context: the process, started and ended. `sync`: more of its [sync] table; `engine`: its [engine] table."""

    folder: Path
    releases: Releases
    sync: Mapping[str, Any] = field(default_factory=dict)
    engine: str = ""
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> OneNode:
        self.folder.mkdir(parents=True, exist_ok=True)
        options = {"interval_s": 0.2, "min_gap_s": 0.05, "probation_s": 0.0, **self.sync}
        table = "\n".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
        self.config.write_text(
            f'name = "one"\nstate_dir = "{self.state}"\n'
            f'[server]\nhttp_uds = "{self.folder}/http.sock"\ngrpc_uds = "{self.folder}/grpc.sock"\n'
            f"[cache]\nenabled = false\n[engine]\n{self.engine}\n"
            f'[sync]\nsource = "{self.releases.address}"\nroot = "{self.releases.root}"\n{table}\n'
        )
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    @property
    def config(self) -> Path:
        return self.folder / "node.toml"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def log(self) -> Path:
        return self.folder / "node.log"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(bound("edge", "run", "--config", self.config), stdout=log, stderr=log)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def client(self) -> AsyncClient:
        return AsyncClient([f"unix:{self.folder}/grpc.sock"])

    async def until_serves(self, client: AsyncClient, model: str, version: str | None, within_s: float = 30.0) -> str:
        """The version that answers, once it is `version` (any, where None). Raises TimeoutError with the log's end."""
        x = X if model == LINEAR else np.ones((1, 16), np.float32)
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            with contextlib.suppress(Exception):
                answer = await client.infer(model, {"x": x}, timeout_s=2.0)
                if version in (None, answer.version):
                    return answer.version
            assert self.process is not None
            if self.process.poll() not in (None, -signal.SIGKILL):
                raise TimeoutError(f"the node ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
            await asyncio.sleep(0.005)
        raise TimeoutError(f"{model}/{version} does not serve after {within_s:g} s:\n{self.log.read_text()[-3000:]}")


@contextlib.contextmanager
def one_node(folder: Path, model: str = LINEAR, **options: Any) -> Iterator[tuple[Releases, OneNode]]:
    with Releases(folder / "world", model=model) as releases:
        releases.release()
        with OneNode(folder / "node", releases, **options) as node:
            yield releases, node
