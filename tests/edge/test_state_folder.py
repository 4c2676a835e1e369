"""A state folder on a disk that is full or read-only: it is said what and where, and serving goes on."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cloud.config import WorkerConfig
from cloud.worker import Worker
from common.cli import main
from edge import Node, NodeConfig
from hardware.install import EngineOptions
from sync.agent.running import SyncOptions
from sync.publisher import Publisher
from sync.service import ServiceConfig, service
from sync.store import Store
from sync.trust.keys import Keys
from sync.trust.repository import Repository
from tests.bundles import WEIGHT, forward, write_bundle

X = np.array([[1.0, 2.0]], np.float32)


@dataclass(frozen=True)
class Disk:
    """A small file system of its own."""

    path: Path

    def fill(self) -> None:
        fd = os.open(self.path / "filler", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        try:
            while True:
                os.write(fd, bytes(4096))
        except OSError:
            os.close(fd)

    def free(self) -> None:
        (self.path / "filler").unlink()

    def remount(self, mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", self.path], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", path], check=False, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@dataclass(frozen=True)
class Sync:
    publisher: Publisher
    options: SyncOptions


@pytest.fixture
async def sync(tmp_path: Path) -> AsyncIterator[Sync]:
    """A running sync service with version 1 of `linear`."""
    store, keys = Store(tmp_path / "store"), tmp_path / "keys"
    (tmp_path / "root.json").write_bytes(Repository(store, Keys.create(keys)).create())
    publisher = Publisher(store, Keys(keys))
    publisher.publish(write_bundle(tmp_path / "bundle"))
    async with service(ServiceConfig(store=str(store.root))) as address:
        root = str(tmp_path / "root.json")
        yield Sync(publisher, SyncOptions(source=address, root=root, interval_s=0.2, min_gap_s=0.1, probation_s=0.0))


async def until_version(node: Node | Worker, version: str) -> None:
    async with asyncio.timeout(20):
        while (loaded := node.local.repository.current("linear")) is None or loaded.version != version:
            await asyncio.sleep(0.02)


async def test_full_disk_stops_updates_only_and_says_where(
    tmp_path: Path, disk: Disk, sync: Sync, caplog: pytest.LogCaptureFixture
) -> None:
    config = NodeConfig(state_dir=str(disk.path / "node"), sync=sync.options)
    async with Node(config) as node:
        await until_version(node, "1")
        disk.fill()
        sync.publisher.publish(write_bundle(tmp_path / "two", weight=2 * WEIGHT))
        assert node.agent is not None
        async with asyncio.timeout(10):
            while node.agent.last_error is None:
                await asyncio.sleep(0.02)
        assert str(disk.path / "node") in node.agent.last_error
        assert "No space left" in node.agent.last_error or "full" in node.agent.last_error
        for number in range(3):
            answer = await node.infer("linear", {"x": X + number})
            np.testing.assert_allclose(answer.outputs["logits"], forward(X + number), rtol=1e-6)
            assert answer.stamp.version == "1"
    async with Node(config) as node:  # and a start on the full disk serves what is installed
        answer = await node.infer("linear", {"x": X})
        assert (answer.stamp.target, answer.stamp.version) == ("edge", "1")
        disk.free()
        await until_version(node, "2")
    disk.remount("ro")
    try:
        caplog.clear()
        async with Node(config) as node:
            answer = await node.infer("linear", {"x": X})
            assert (answer.stamp.target, answer.stamp.version) == ("edge", "2")
            sync.publisher.publish(write_bundle(tmp_path / "three", weight=3 * WEIGHT))
            await until_version(node, "3")  # in memory
            answer = await node.infer("linear", {"x": X})
            np.testing.assert_allclose(answer.outputs["logits"], forward(X, 3 * WEIGHT), rtol=1e-6)
            assert {path.name for path in (disk.path / "node/sync/models/linear").iterdir()} == {"1", "2"}
        async with Node(config) as node:  # which is gone with the process: it begins again from the disk
            await until_version(node, "3")
    finally:
        disk.remount("rw")
    assert f"{disk.path}/node/sync/lock: Read-only file system; serving what is installed" in caplog.text
    assert not list(Path("/dev/shm").glob("outrider-*-*"))
    async with Node(config) as node:
        await until_version(node, "3")
    assert (disk.path / "node/sync/models/linear/3").is_dir()


async def test_what_is_too_large_for_memory_serves_from_the_read_only_disk(
    disk: Disk, sync: Sync, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = NodeConfig(state_dir=str(disk.path / "node"), sync=sync.options)
    async with Node(config) as node:
        await until_version(node, "1")
    monkeypatch.setattr("sync.agent.in_memory._SHARE", 0.0)
    disk.remount("ro")
    try:
        async with Node(config) as node:
            assert node.agent is None
            answer = await node.infer("linear", {"x": X})
            assert (answer.stamp.target, answer.stamp.version) == ("edge", "1")
    finally:
        disk.remount("rw")
    assert "cannot go on in memory: what serves has" in caplog.text
    assert "no updates of parameters" in caplog.text


async def test_worker_that_never_had_anything_starts_on_a_full_disk(
    disk: Disk, sync: Sync, caplog: pytest.LogCaptureFixture
) -> None:
    disk.fill()
    engine = EngineOptions(variants=("full",), engines=("onnxruntime",))
    async with Worker(WorkerConfig(state_dir=str(disk.path / "worker"), sync=sync.options, engine=engine)) as worker:
        assert worker.dataplane.is_ready()
        assert await worker.dataplane.catalog.index() == []
    assert str(disk.path / "worker") in caplog.text


def test_publisher_on_a_full_disk_says_what_could_not_be_written(
    tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--store", str(disk.path / "store"), "--keys", str(tmp_path / "keys"))
    assert main(["sync", "keys", "init", *where]) == 0
    disk.fill()
    bundle = write_bundle(tmp_path / "bundle")
    capsys.readouterr()
    assert main(["publish", "--bundle", str(bundle), *where]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{disk.path}/store/" in err
    assert "No space left on device" in err


async def test_sync_service_on_a_full_read_only_disk_hands_out_what_it_has(tmp_path: Path, disk: Disk) -> None:
    store, keys = Store(disk.path / "store"), tmp_path / "keys"
    (tmp_path / "root.json").write_bytes(Repository(store, Keys.create(keys)).create())
    Publisher(store, Keys(keys)).publish(write_bundle(tmp_path / "bundle"))
    disk.fill()
    disk.remount("ro")
    async with service(ServiceConfig(store=str(store.root), keys=str(keys))) as address:
        options = SyncOptions(source=address, root=str(tmp_path / "root.json"), interval_s=0.2, min_gap_s=0.1)
        async with Node(NodeConfig(state_dir=str(tmp_path / "node"), sync=options)) as node:
            await until_version(node, "1")


async def test_node_with_a_damaged_journal_begins_a_new_one_and_is_up_to_date_again(
    tmp_path: Path, sync: Sync, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "node/sync"
    folder.mkdir(parents=True)
    (folder / "journal.db").write_bytes(b"no database" * 100)
    async with Node(NodeConfig(state_dir=str(tmp_path / "node"), sync=sync.options)) as node:
        await until_version(node, "1")
    assert "file is not a database" in caplog.text
    assert (folder / "journal.db.damaged").exists()
