"""`outrider publish`: built once per content, released once per content, each interval where that is asked for."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud.publish import source_digest
from common.cli import main
from common.errors import BuildError
from common.tensorfile import read_tensors, write_tensors


class Fleet:
    """A store with keys, and a source of digits that may be changed."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.source = folder / "source"
        shutil.copytree(source, self.source)
        self.where = ["--store", str(folder / "store"), "--keys", str(folder / "keys")]
        assert main(["sync", "keys", "init", *self.where]) == 0

    def arguments(self, *flags: str) -> list[str]:
        return ["publish", str(self.source / "model.toml"), *self.where, "--json", *flags]

    def train(self, factor: float) -> None:
        """Another checkpoint: the last layer's bias moved. Replaced in one rename, as a trainer would."""
        path = self.source / "checkpoint.safetensors"
        tensors = read_tensors(path)
        tensors["last.bias"] = tensors["last.bias"] * np.float32(factor)
        write_tensors(path.with_suffix(".new"), tensors)
        path.with_suffix(".new").replace(path)


@pytest.fixture
def fleet(tmp_path: Path, digits_source: Path) -> Fleet:
    return Fleet(tmp_path, digits_source)


def publish(fleet: Fleet, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(fleet.arguments(*flags)) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_what_has_not_changed_is_neither_built_nor_released_again(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    first = publish(fleet, capsys)
    assert (first["version"], first["is_new"]) == ("1", True)
    [bundle] = (fleet.source / "bundles" / "digits").glob("*/bundle.json")
    built = bundle.stat().st_mtime_ns
    again = publish(fleet, capsys)
    assert (again["version"], again["is_new"]) == ("1", False)
    assert bundle.stat().st_mtime_ns == built
    forced = publish(fleet, capsys, "--force")
    assert (forced["version"], forced["epoch"], forced["slabs_new"]) == ("2", 2, 0)


def test_a_changed_checkpoint_is_a_new_version_of_which_little_is_fetched(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(fleet, capsys)
    fleet.train(1.01)
    second = publish(fleet, capsys)
    assert (second["version"], second["is_new"]) == ("2", True)
    latest = fleet.source / "bundles" / "digits" / "latest"
    report = json.loads((latest.parent / latest.read_text().strip() / "report.json").read_text())
    assert [one["scales"] and one["scales"]["is_kept"] for one in report["variants"]] == [True, True, None]
    sizes = {one["variant"]: one for one in second["variants"] if one["engine"] == "onnxruntime"}
    assert 0 < sizes["cpu-int8"]["slabs_new"] < sizes["cpu-int8"]["slabs"]
    assert second["bytes_delta"] < second["bytes_full"] / 10


def test_a_damaged_bundle_before_does_not_hold_up_a_release(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    home = fleet.source / "bundles" / "digits"
    (home / "before").mkdir(parents=True)
    (home / "before" / "report.json").write_text("{")
    (home / "latest").write_text("before\n")
    assert main(fleet.arguments()) == 0
    said = capsys.readouterr()
    assert "digits: built without a predecessor: " in said.err
    assert json.loads(said.out)["version"] == "1"


def test_a_bundle_that_was_built_elsewhere_is_released_as_it_is(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = str(fleet.source / "model.toml")
    assert main(["model", "build", spec, "--out", str(tmp_path / "bundle")]) == 0
    capsys.readouterr()
    assert main(["publish", "--bundle", str(tmp_path / "bundle"), *fleet.where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == "1"


def test_the_digest_covers_every_file_that_the_build_reads(fleet: Fleet) -> None:
    spec = fleet.source / "model.toml"
    digests = {source_digest(spec)}
    for name in ("checkpoint.safetensors", "calibration.safetensors", "heldout.safetensors", "model.toml"):
        with (fleet.source / name).open("ab") as file:
            file.write(b"\n")
        digests.add(source_digest(spec))
    assert len(digests) == 5
    (fleet.source / "calibration.safetensors").unlink()
    with pytest.raises(BuildError, match=r"calibration\.safetensors cannot be read"):
        source_digest(spec)


def test_keys_or_source_that_are_not_there_are_explained(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", str(tmp_path / "nothing.toml"), *fleet.where]) == 2
    assert "nothing.toml" in capsys.readouterr().err
    assert main(["publish", str(fleet.source / "model.toml"), *fleet.where[:2], "--keys", str(tmp_path / "no")]) == 1
    assert "key" in capsys.readouterr().err


@contextlib.contextmanager
def every(fleet: Fleet, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = (sys.executable, "-m", "common.cli", *fleet.arguments("--every", "--interval-s", "0.3"))
    with output.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def test_every_interval_the_source_is_read_again_and_only_changes_are_released(fleet: Fleet, tmp_path: Path) -> None:
    output = tmp_path / "output"

    def releases() -> int:
        return output.read_text().count('"is_new": true')

    def until(count: int) -> None:
        deadline = time.monotonic() + 60
        while releases() < count:
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)

    with every(fleet, output) as process:
        until(1)
        time.sleep(1.0)  # three intervals without a change
        assert releases() == 1
        fleet.train(1.01)
        until(2)
        fleet.train(float("nan"))  # a training that blew up: refused, and not built again and again
        deadline = time.monotonic() + 60
        while "not released" not in output.read_text():
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        time.sleep(0.7)
        assert output.read_text().count("not released") == 1
        assert releases() == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_number_of_bases_that_makes_no_sense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for bases in ("-1", "65"):
        assert main(["publish", "m.toml", "--store", str(tmp_path), "--keys", str(tmp_path), "--bases", bases]) == 2
        assert "--bases" in capsys.readouterr().err
