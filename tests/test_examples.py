"""What is in examples/, and the programs in README.md, run as they stand."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cloud.publish import bundle_of, source_digest
from common.config import load_toml
from edge import CacheOptions, Node, NodeConfig, ServerOptions, StaticModel
from tests.bundles import write_bundle

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_example_configuration_is_accepted() -> None:
    config = load_toml(EXAMPLES / "node.toml", NodeConfig)
    assert config.sync is not None
    assert config.engine.max_batch == {"digits": 4}


def test_the_in_process_example_answers(tmp_path: Path) -> None:
    command = (sys.executable, str(EXAMPLES / "in_process.py"), str(write_bundle(tmp_path)))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "linear 1 answered on the edge" in done.stdout


async def test_the_programs_in_the_readme_answer(
    digits_source: Path,
    bundles: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_process, client = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)
    spec = digits_source / "model.toml"
    bundle = bundle_of(spec, source_digest(spec), bundles / "bundles", skip_gate=False, say=lambda _line: None)
    kept = tmp_path / ".local/state/outrider/bundles/digits"
    kept.mkdir(parents=True)
    (kept / bundle.name).symlink_to(bundle)
    monkeypatch.setenv("HOME", str(tmp_path))
    await asyncio.to_thread(exec, in_process, {})
    config = NodeConfig(
        models=(StaticModel(bundle=str(bundle)),), cache=CacheOptions(enabled=False), server=ServerOptions(grpc_port=0)
    )
    async with Node(config) as node:
        assert client.count("127.0.0.1:8603") == 1  # edge-a of `outrider up`
        program = client.replace("127.0.0.1:8603", node.endpoint()["grpc"])
        await asyncio.to_thread(exec, program, {})
    first, second = (line for line in capsys.readouterr().out.splitlines() if "edge" in line)
    assert first.endswith(" edge 1")
    assert second.endswith(" edge None 1")
