"""The command line of the builder: what it prints, and what importing it costs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hardware.build.command import register
from tests.hardware.build.conftest import Prepared


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["model", "build", *arguments])
    code: int = parsed.run(parsed)
    return code


def test_a_build_prints_a_table_and_its_progress(
    digits_v2: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(digits_v2.folder / "model.toml"), "--out", str(tmp_path / "b")) == 0
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()[2:5]] == ["trt-int8", "cpu-int8", "full"]
    assert "exported to ONNX" in said.err


def test_json_is_the_report(digits_v2: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(str(digits_v2.folder / "model.toml"), "--out", str(tmp_path / "b"), "--json")
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "b/report.json").read_text())


@pytest.mark.parametrize("module", ["hardware.build.command", "hardware.demo.command"])
def test_registering_the_command_loads_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'numpy', 'torch', 'onnx', 'onnxruntime'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
