"""What the command line says to wrong values and missing files: one line, exit 2, never a traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from common.cli import main
from common.up.status import default_state

MODEL = """name = "m"
task = "tensor"
source = {factory = "a:b", checkpoint = "m.pt"}
inputs = [{name = "x", datatype = "FP32", shape = [-1, 2]}]
outputs = [{name = "y", datatype = "FP32", shape = [-1, 2]}]
holdout = {file = "h.safetensors"}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "key.toml": 'nam = "x"\n',
        "deep.toml": 'state_dir = "s"\n[server]\nhttp_prot = 1\n',
        "syntax.toml": "= nonsense",
        "type.toml": 'max_queue_rows = "x"\n',
        "range.toml": 'state_dir = "s"\ndrain_s = nan\n',
        "port.toml": 'workers = ["a:1"]\n[server]\nhttp_port = 70000\n',
        "workers.toml": 'workers = "a:1"\n',
        "model.toml": MODEL,
        "file": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.toml").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("edge run --config DIR/nothing.toml", "DIR/nothing.toml: cannot be read: No such file"),
        ("edge run --config DIR/folder.toml", "DIR/folder.toml: cannot be read: Is a directory"),
        ("edge run --config DIR/bytes.toml", "DIR/bytes.toml: is not TOML"),
        ("edge run --config DIR/syntax.toml", "DIR/syntax.toml: is not TOML"),
        ("edge run --config DIR/key.toml", "nam: unknown key; accepted: did you mean 'name'?"),
        ("edge run --config DIR/deep.toml", "server.http_prot: unknown key; accepted: did you mean 'http_port'?"),
        ("edge run --config DIR/type.toml", "max_queue_rows: Expected `int`, got `str`"),
        ("edge run --config DIR/range.toml", "drain_s must be 0..600, got nan"),
        ("cloud gateway --config DIR/port.toml", "server: http_port must be 0..65535, got 70000"),
        ("cloud gateway --config DIR/workers.toml", "workers: Expected `array`, got `str`"),
        ("cloud worker --config DIR/key.toml", "did you mean 'name'?"),
        ("sync serve --store DIR/s --port 99999", "port must be 0..65535, got 99999"),
        ("sync serve --config DIR/key.toml", "did you mean 'name'?"),
        ("sync serve", "store"),
        ("sync broker --port 99999", "127.0.0.1:99999: cannot listen"),
        ("sync keys init --keys DIR/file --store DIR/s", "--keys: DIR/file cannot be used: File exists"),
        ("sync keys init --keys DIR/k --store DIR/file", "--store: DIR/file cannot be used: File exists"),
        ("model build DIR/model.toml --out DIR/o", "pickled checkpoints are not opened"),
        ("publish DIR/nothing.toml --store DIR/s --keys DIR/k", "DIR/nothing.toml: cannot be read"),
        ("publish DIR/model.toml --store DIR/s --keys DIR/k --every --interval-s nan", "--interval-s: got nan"),
        ("demo prepare digits --out DIR/file", "--out: DIR/file cannot be used"),
        ("status --state DIR/nothing", "no system runs in DIR/nothing"),
        ("up --base-port 1 --state DIR/up", "--base-port: got 1; accepted: 0 (free ports), or 1024.."),
        ("up --interval-s -5 --state DIR/up", "--interval-s: got -5"),
        ("up --state DIR/file", "--state: DIR/file cannot be used"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_2(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    assert main([word.replace("DIR", str(folder)) for word in line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("outrider: ")
    assert err.count("\n") == 1
    assert says.replace("DIR", str(folder)) in err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("publish --bundle DIR/nothing --store DIR/s --keys DIR/k", "bundle DIR/nothing: bundle.json cannot be read"),
        ("sync keys init --keys DIR/k --store DIR/s --root DIR/file/root.json", "DIR/file"),
    ],
)
def test_what_fails_on_the_way_is_one_line_and_exit_1(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    assert main([word.replace("DIR", str(folder)) for word in line.split()]) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("outrider: ")
    assert says.replace("DIR", str(folder)) in err


@pytest.mark.parametrize("line", ["", "nothing", "edge run", "edge run --config x --log xml", "up --interval-s x"])
def test_a_wrong_command_is_explained_with_its_usage(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    assert "usage: outrider" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "folder"),
    [("", "HOME/.local/state"), ("state", "HOME/.local/state"), ("~/state", "HOME/.local/state"), ("/state", "/state")],
)
def test_a_state_folder_in_the_environment_counts_where_it_is_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, folder: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", value)
    assert default_state() == Path(folder.replace("HOME", str(tmp_path))) / "outrider"


def test_a_port_in_use_is_said_in_one_line_by_processes_that_serve(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, text in (
            ("edge run", f'state_dir = "{tmp_path}"\nserver.grpc_port = {port}\n'),
            ("cloud gateway", f'workers = ["127.0.0.1:9"]\nserver.http_port = {port}\n'),
        ):
            (tmp_path / f"{name}.toml").write_text(text)
        lines = [
            *([*name.split(), "--config", str(tmp_path / f"{name}.toml")] for name in ("edge run", "cloud gateway")),
            ["sync", "serve", "--store", str(tmp_path), "--port", str(port)],
        ]
        runs = [
            subprocess.Popen([sys.executable, "-m", "common.cli", *line], stderr=subprocess.PIPE, text=True)
            for line in lines
        ]
        for run in runs:
            _, err = run.communicate(timeout=60)
            assert (run.returncode, err.count("\n")) == (2, 1), err
            assert str(port) in err
            assert "in use" in err
