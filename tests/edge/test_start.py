"""What a node or a worker refuses to start with: another's state folder, one model twice."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cloud.config import WorkerConfig
from cloud.worker import Worker
from common.errors import ConfigError
from common.serving.state_folder import owned
from common.transport.process import ServingProcess
from edge import Node, NodeConfig
from hardware.install import EngineOptions
from hardware.serving import StaticModel
from tests.bundles import write_bundle

Start = Callable[[Path, tuple[StaticModel, ...]], ServingProcess]


def node(state: Path, models: tuple[StaticModel, ...] = ()) -> ServingProcess:
    return Node(NodeConfig(state_dir=str(state), models=models))


def worker(state: Path, models: tuple[StaticModel, ...] = ()) -> ServingProcess:
    engine = EngineOptions(variants=("full",), engines=("onnxruntime",))
    return Worker(WorkerConfig(state_dir=str(state), models=models, engine=engine))


starts = pytest.mark.parametrize("start", [node, worker])


@starts
async def test_a_state_folder_belongs_to_one_process_while_it_runs(tmp_path: Path, start: Start) -> None:
    async with start(tmp_path / "state", ()):
        said = rf"state_dir: {tmp_path}/state is in use by process {os.getpid()}; accepted: a folder for each process"
        with pytest.raises(ConfigError, match=said):
            async with start(tmp_path / "state", ()):
                pass
    async with start(tmp_path / "state", ()):
        pass


def test_a_holder_that_is_not_known_is_another_process(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="in use by another process"), owned(tmp_path, "edge"):
            pass


def test_a_folder_that_cannot_be_made_is_no_fault_of_the_lock(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with owned(tmp_path / "file" / "state", "edge"):
        pass


def test_an_error_meanwhile_passes_and_frees_the_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="mine"), owned(tmp_path, "edge"):
        raise OSError("mine")
    with owned(tmp_path, "edge"):
        pass


@starts
async def test_two_bundles_of_one_model_are_refused(tmp_path: Path, start: Start) -> None:
    one, two = (StaticModel(bundle=str(write_bundle(tmp_path / name)), version=name) for name in ("one", "two"))
    said = rf"models: \[1\]\.bundle: {tmp_path}/two is model 'linear', and so is {tmp_path}/one"
    with pytest.raises(ConfigError, match=said):
        async with start(tmp_path / "state", (one, two)):
            pass
