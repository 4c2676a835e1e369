"""`outrider sync watch`: a trainer's newest finished checkpoint is released, at most once in an interval."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud.publish import Release
from cloud.watch import Train, Watching
from common.cli import main, parser
from common.errors import BuildError, StoreBusy
from common.tensorfile import read_tensors, write_tensors
from sync.agent.client import GrpcSource
from sync.agent.probation import ProbationLimits
from sync.agent.reports import GrpcReports
from sync.fleet import read_fleet
from sync.pki.channel import PlainDialer
from sync.service import ServiceConfig
from sync.watch.places import place_of
from tests.sync.fakes import FakeInstaller, World, running, weights


@dataclass
class Trainer:
    """A folder that checkpoints are written into, and who watches it."""

    spec: Path
    folder: Path
    now: float = 0.0
    written: int = 0

    def write(self, name: str, factor: float) -> Path:
        """A checkpoint of digits with its last bias moved; each is a second younger than the one before."""
        tensors = read_tensors(self.spec.parent / "checkpoint.safetensors")
        tensors["last.bias"] = tensors["last.bias"] * np.float32(factor)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors)
        self.written += 1
        os.utime(path, (1e9 + self.written, 1e9 + self.written))
        return path

    def watching(self, release: Any, **options: Any) -> Watching:
        bundles, place = self.spec.parent / "bundles", place_of(str(self.folder))
        return Watching(release, place, bundles, interval_s=900.0, now=lambda: self.now, **options)


@pytest.fixture
def trainer(tmp_path: Path, digits_source: Path) -> Trainer:
    shutil.copytree(digits_source, tmp_path / "source")
    (tmp_path / "trainer").mkdir()
    return Trainer(tmp_path / "source/model.toml", tmp_path / "trainer")


@dataclass
class Noted:
    """Stands in for a `Release`: notes the checkpoints that it was given; `fail` is raised instead."""

    args: argparse.Namespace
    checkpoint: Path | None = None
    fail: Exception | None = None
    released: list[float] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def once(self) -> None:
        if self.fail is not None:
            raise self.fail
        assert self.checkpoint is not None
        self.released.append(float(read_tensors(self.checkpoint)["last.bias"][0]))

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def noted(trainer: Trainer) -> Noted:
    return Noted(argparse.Namespace(spec=trainer.spec))


def bias(trainer: Trainer, factor: float) -> float:
    first = read_tensors(trainer.spec.parent / "checkpoint.safetensors")["last.bias"][0]
    return float(first * np.float32(factor))


def test_each_interval_the_newest_is_released_and_those_between_are_skipped(trainer: Trainer, noted: Noted) -> None:
    watching = trainer.watching(noted)
    trainer.write("step-1/model.safetensors", 1.1)
    watching.once()
    assert noted.released == []  # seen once
    watching.once()
    for step, factor in ((2, 1.2), (3, 1.3)):
        trainer.write(f"step-{step}/model.safetensors", factor)
        watching.once()
        watching.once()
    assert noted.released == [bias(trainer, 1.1)]
    trainer.now = 901.0
    watching.once()
    watching.once()
    assert noted.released == [bias(trainer, 1.1), bias(trainer, 1.3)]


def test_a_half_written_checkpoint_waits_and_the_finished_one_before_it_is_released(
    trainer: Trainer, noted: Noted
) -> None:
    watching = trainer.watching(noted)
    trainer.write("1.safetensors", 1.1)
    half = trainer.write("2.safetensors", 1.2)
    whole = half.read_bytes()
    half.write_bytes(whole[: len(whole) // 2])
    for _ in range(3):
        watching.once()
    assert noted.released == [bias(trainer, 1.1)]
    trainer.now = 901.0
    for _ in range(3):
        watching.once()
    assert len([line for line in noted.lines if "2.safetensors" in line and "cut off" in line]) == 1
    half.write_bytes(whole)
    watching.once()
    watching.once()
    assert noted.released == [bias(trainer, 1.1), bias(trainer, 1.2)]


def test_the_same_content_and_older_checkpoints_are_not_released_again(trainer: Trainer, noted: Noted) -> None:
    trainer.write("1.safetensors", 1.1)
    newest = trainer.write("2.safetensors", 1.2)
    watching = trainer.watching(noted)
    watching.once()
    watching.once()
    shutil.copyfile(newest, trainer.folder / "3.safetensors")
    trainer.now = 901.0
    watching.once()
    watching.once()
    for path in (newest, trainer.folder / "3.safetensors"):
        path.unlink()
    again = trainer.watching(noted)  # another run remembers
    for _ in range(3):
        watching.once()
        again.once()
    assert noted.released == [bias(trainer, 1.2)]


def test_a_checkpoint_that_cannot_be_built_is_not_tried_again_but_a_busy_store_is(
    trainer: Trainer, noted: Noted
) -> None:
    watching = trainer.watching(noted)
    trainer.write("1.safetensors", 1.1)
    watching.once()
    for fail in (StoreBusy("store", 60), BuildError("does not fit")):
        noted.fail = fail
        with pytest.raises(type(fail)):
            watching.once()
        watching.once()  # not before the interval is over
        trainer.now += 901.0
    noted.fail = None
    watching.once()
    assert noted.released == []
    trainer.write("2.safetensors", 1.2)
    watching.once()
    watching.once()
    assert noted.released == [bias(trainer, 1.2)]


def test_a_checkpoint_is_built_and_released_like_any_source(
    trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--store", str(tmp_path / "store"), "--keys", str(tmp_path / "keys")]
    assert main(["sync", "keys", "init", *where]) == 0
    args = parser().parse_args(
        ["sync", "watch", str(trainer.folder), "--model", str(trainer.spec), *where, "--every", "15m", "--json"]
    )
    watching = trainer.watching(Release.of(args))
    trainer.write("step-1/model.safetensors", 1.01)
    watching.once()
    watching.once()
    released = json.loads(capsys.readouterr().out)
    assert (released["model"], released["version"], released["is_new"]) == ("digits", "1", True)
    [bundle] = (trainer.spec.parent / "bundles/digits").glob("*/bundle.json")
    kept = read_tensors(bundle.parent / "full/model.safetensors")
    assert kept["last.bias"][0] == np.float32(bias(trainer, 1.01))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--every", "soon"], "--every: got 'soon'"),
        (["--look", "0s"], "--look: got '0s'"),
        (["--every", "99d"], "--every"),
        (["--bundles", "{trainer}/bundles"], "taken for checkpoints"),
    ],
)
def test_wrong_flags_are_told_at_the_start(
    trainer: Trainer, capsys: pytest.CaptureFixture[str], flags: list[str], problem: str
) -> None:
    flags = [flag.format(trainer=trainer.folder) for flag in flags]
    command = ["sync", "watch", str(trainer.folder), "--model", str(trainer.spec), "--store", "s", "--keys", "k"]
    assert main([*command, *flags]) == 2
    assert problem in capsys.readouterr().err


@dataclass
class Published:
    """Stands in for building a bundle; what it releases is real."""

    args: argparse.Namespace
    world: World
    checkpoint: Path | None = None
    lines: list[str] = field(default_factory=list)

    def once(self) -> None:
        assert self.checkpoint is not None
        bias = read_tensors(self.checkpoint)["last.bias"]
        self.world.publish(weights() | {"fc.bias": bias.astype(np.float32)})

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_in_train_mode_the_newest_waits_for_the_end_of_the_rollout_and_those_between_are_skipped(
    trainer: Trainer, tmp_path: Path
) -> None:
    """A service, two nodes that report to it, one of them with a probation."""
    world = World(tmp_path / "world")
    release = Published(argparse.Namespace(spec=trainer.spec), world)
    state = tmp_path / "state"
    config = ServiceConfig(store=str(world.store.root), state=str(state))
    with running(config) as address, contextlib.ExitStack() as stack:
        agents = []
        for name, seconds in (("quick", 0.0), ("watching", 60.0)):
            reporter = GrpcReports(address, lambda name=name: name, PlainDialer())  # type: ignore[misc]
            wiring = {"source": GrpcSource(address, timeout_s=10.0), "reporter": reporter}
            probation = ProbationLimits(seconds=seconds)
            agents.append(stack.enter_context(world.agent(FakeInstaller(), name, probation=probation, **wiring)))

        def poll() -> list[str | None]:
            for agent in agents:
                assert agent.run_once()
            return [one.active for agent in agents for one in agent.status()]

        train = Train(
            lambda: read_fleet(state / "fleet.db"), world.publisher.current, home=state / "train", deadline_s=3600.0
        )
        watching = trainer.watching(release, rollouts=train)

        def look() -> None:
            trainer.now += 1000.0  # more than an interval
            watching.once()
            watching.once()

        trainer.write("1.safetensors", 1.1)
        look()
        assert poll() == ["1", "1"]
        trainer.write("2.safetensors", 1.2)
        look()
        assert poll() == ["1", "1"]
        assert release.lines[-1].endswith("digits/1 is on its way to 1 of 2 nodes (watching)")
        trainer.write("3.safetensors", 1.3)
        look()
        world.clock.advance(seconds=61)
        agents[1].look()  # its probation has ended well
        poll()
        look()
        assert poll() == ["2", "2"]
        manifest = world.publisher.manifest("digits", "2")
        assert manifest is not None
        assert float(
            read_tensors(trainer.spec.parent / "bundles/digits/.watched/checkpoint.safetensors")["last.bias"][0]
        ) == bias(trainer, 1.3)
        assert world.publisher.manifest("digits", "3") is None


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--mode", "train"), "--fleet: is not given"),
        (("--mode", "train", "--fleet", "nowhere"), "nowhere has no fleet.db"),
        (("--fleet", "somewhere"), "belong to another mode"),
    ],
)
def test_train_wants_to_know_where_nodes_report(
    trainer: Trainer, tmp_path: Path, flags: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path / "world")
    where = ["--store", str(world.store.root), "--keys", str(world.folder / "keys"), "--model", str(trainer.spec)]
    assert main(["sync", "watch", str(trainer.folder), *where, *flags]) == 2
    assert what in capsys.readouterr().err
