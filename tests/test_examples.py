"""What is in examples/ runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from common.config import load_toml
from edge import NodeConfig
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
