from __future__ import annotations

import argparse
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, KeyMissing
from sync.command import _service_config, register
from sync.store import Store
from sync.trust import keys
from sync.trust.repository import Repository

MAIN = """
import argparse, sys
from sync.command import register
parser = argparse.ArgumentParser()
register(parser.add_subparsers())
args = parser.parse_args()
sys.exit(args.run(args))
"""
HEAVY = ("grpc", "tuf", "amqtt", "aiomqtt", "numpy")


def parse(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    return parser.parse_args(["sync", *args])


def run(*args: str) -> int:
    parsed = parse(*args)
    return int(parsed.run(parsed))


def test_registering_imports_nothing_heavy() -> None:
    code = f"import sys, sync.command; print([name for name in {HEAVY} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_keys_are_made_once(tmp_path: Path) -> None:
    folders = {f"--{name}": str(tmp_path / name[0]) for name in ("keys", "store", "root")}
    where = ("keys", "init", *(word for pair in folders.items() for word in pair))
    assert run(*where) == 0
    root = (tmp_path / "r").read_bytes()
    assert json.loads(root)["signed"]["_type"] == "root"
    with pytest.raises(KeyMissing):
        run(*where)
    assert run(*where, "--if-absent") == 0
    assert (tmp_path / "r").read_bytes() == root


@pytest.mark.parametrize("cut", range(11))
def test_keys_that_were_cut_off_while_they_were_made_are_made_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """Each private file, then each signed one, in turn is the last to be written, and a private one half of it."""
    writes = itertools.count()

    def cutting(write: Callable[..., object]) -> Callable[..., object]:
        def replaced(*args: Any) -> object:
            if next(writes) == cut:
                if isinstance(args[0], Path):
                    args[0].write_bytes(args[1][:20])
                    args[0].chmod(0o600)
                raise KeyboardInterrupt
            return write(*args)

        return replaced

    where = ("keys", "init", "--keys", str(tmp_path / "k"), "--store", str(tmp_path / "s"), "--if-absent")
    with monkeypatch.context() as patched:
        patched.setattr(keys, "_write_private", cutting(keys._write_private))
        patched.setattr(Store, "replace", cutting(Store.replace))
        with pytest.raises(KeyboardInterrupt):
            run(*where)
    assert run(*where) == 0
    made = Repository(Store(tmp_path / "s"), keys.Keys(tmp_path / "k"))
    assert {path.stem for path in (tmp_path / "k").iterdir()} == set(keys.ROLES)
    assert made.renew() is False  # all of it is signed, by keys that are there
    made.add({"releases/m/1.json": b"{}"}, {})
    with pytest.raises(KeyMissing, match="not overwritten"):
        run("keys", "init", "--keys", str(tmp_path / "k"), "--store", str(tmp_path / "other"))


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sync.toml"
    path.write_text('store = "a"\nport = 7000\ngroup = "g"\n')
    config = _service_config(parse("serve", "--config", str(path), "--port", "0"))
    assert (config.store, config.port, config.group, config.host) == ("a", 0, "g", "127.0.0.1")


@pytest.mark.parametrize("text", ['store = "a"\nprot = 1', "store = 3", 'store = "a"\nport = 99999', "no toml", ""])
def test_a_wrong_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sync.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"sync\.toml"):
        _service_config(parse("serve", "--config", str(path)))


@pytest.mark.parametrize("kind", ["serve", "broker"])
def test_a_process_says_where_it_is_and_ends_on_sigterm(tmp_path: Path, kind: str) -> None:
    run("keys", "init", "--keys", str(tmp_path / "k"), "--store", str(tmp_path / "s"))
    endpoint = tmp_path / "endpoint.json"
    args = [kind, "--endpoint-file", str(endpoint), *(["--store", str(tmp_path / "s")] if kind == "serve" else [])]
    process = subprocess.Popen([sys.executable, "-c", MAIN, "sync", *args], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 20
        while not endpoint.exists() and time.monotonic() < end:
            time.sleep(0.02)
        told = json.loads(endpoint.read_text())
        assert told["pid"] == process.pid
        host, _, port = told["grpc" if kind == "serve" else "mqtt"].rpartition(":")
        assert (host, int(port) > 0) == ("127.0.0.1", True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
