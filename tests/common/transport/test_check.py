"""`--check` reads a configuration file, says what it thinks of it and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.cli import main

EXAMPLES = Path(__file__).parents[3] / "examples"
COMMANDS = {
    "node": ("edge", "run"),
    "gateway": ("cloud", "gateway"),
    "worker": ("cloud", "worker"),
    "service": ("sync", "serve"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_sound_file_is_called_sound(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = EXAMPLES / f"{name}.toml"
    assert main([*COMMANDS[name], "--config", str(file), "--check"]) == 0
    assert capsys.readouterr().out == f"{file} is sound\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_key_is_named_with_the_nearest_right_one(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text('nmae = "x"\n' + (EXAMPLES / f"{name}.toml").read_text(encoding="utf-8"), encoding="utf-8")
    assert main([*COMMANDS[name], "--config", str(file), "--check"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"outrider: {file}: nmae: unknown key; accepted: did you mean 'name'?")
