"""docs/config.md is what the code says; every key says what it means; its ranges and examples are true."""

from __future__ import annotations

import argparse
import dataclasses
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common.config import load_toml, parse
from common.config_keys import Key, keys
from common.errors import ConfigError
from common.reference import ENVIRONMENT, Undescribed, _command, _row, files, reference

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FILES = files()
# Sets what else would stand in the way of a key's own range.
APART: Mapping[str, Mapping[str, Any]] = {
    "sync.interval_s": {"min_gap_s": 0.0},
    "image.resize": {"crop": 1},
    "image.crop": {"resize": 8192},
}
DRILLS = "engine.synthetic.NAME"  # rules between its keys: tested where they are


def test_the_reference_is_what_the_code_says() -> None:
    assert (ROOT / "docs/config.md").read_text(encoding="utf-8") == reference(EXAMPLES), "run: make docs"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("folder", ["", "minimal"])
def test_an_example_is_accepted(name: str, folder: str) -> None:
    load_toml(EXAMPLES / folder / f"{name}.toml", FILES[name][1])


@pytest.mark.parametrize("name", FILES)
def test_the_full_example_has_every_key(name: str) -> None:
    text = (EXAMPLES / f"{name}.toml").read_text(encoding="utf-8")
    for key in keys(FILES[name][1]):
        if key.table != DRILLS and key.path != "engine.synthetic":
            assert re.search(rf"(^|[{{\[,#\s.]){key.name}(\s*=|\])", text, re.MULTILINE), f"{key.path} is missing"


@pytest.mark.parametrize("name", FILES)
def test_the_minimal_example_has_no_key_to_spare(name: str) -> None:
    kind = FILES[name][1]
    data = tomllib.loads((EXAMPLES / "minimal" / f"{name}.toml").read_text(encoding="utf-8"))
    for key in keys(kind):
        if key.table == "" and key.default == "required":
            with pytest.raises(ConfigError, match=key.name):
                parse({one: value for one, value in data.items() if one != key.name}, kind, "minimal")


def ranges() -> list[Any]:
    return [
        pytest.param(kind, name, key, id=f"{name}:{key.path}")
        for name, (_, kind) in FILES.items()
        for key in keys(kind)
        if key.limits is not None and key.table != DRILLS
    ]


@pytest.mark.parametrize(("kind", "name", "key"), ranges())
def test_a_key_takes_its_range_and_no_more(kind: type, name: str, key: Key) -> None:
    assert key.limits is not None
    low, high = key.limits
    step = 1 if key.type.startswith(("integer", "table of integers")) else 0.01
    for value in (low, high):
        if value is not None:
            parse(_with(name, key, type(step)(value)), kind, "range")
    for value in (low - step, None if high is None else high + step):
        if value is not None:
            with pytest.raises(ConfigError):
                parse(_with(name, key, type(step)(value)), kind, "range")


def _with(name: str, key: Key, value: object) -> dict[str, Any]:
    """The full example with another value at one key."""
    data = tomllib.loads((EXAMPLES / f"{name}.toml").read_text(encoding="utf-8"))
    table = data
    for part in filter(None, key.table.split(".")):
        table = table[part.removesuffix("[]")]
    table |= APART.get(key.path, {})
    table[key.name] = {"digits": value} if key.type.startswith("table of") else value
    return data


def test_a_comment_becomes_range_and_meaning() -> None:
    first, second, table, third = keys(_Sample)
    assert (first.limits, first.meaning, first.default) == ((0, 600), "time to wait", "1.5")
    assert (second.limits, second.meaning, second.default) == (
        (1, None),
        "most rows, of all models",
        "required",
    )
    assert (table.path, table.default, table.meaning) == ("inner", "see its table", "who else")
    assert (third.path, third.type, third.default) == ("inner.names", "array of strings", '["a"]')


def test_a_key_without_a_comment_is_an_error() -> None:
    [key] = keys(_Silent)
    with pytest.raises(Undescribed, match=r"node\.toml: silent has no comment"):
        _row("node", key)


def test_a_flag_without_help_is_an_error() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--silent", default=3, help="(default: %(default)s)")
    with pytest.raises(Undescribed, match="--silent SILENT has no help text"):
        _command("outrider", parser)


def test_every_environment_variable_that_the_code_reads_is_listed() -> None:
    found = set()
    for package in ("common", "hardware", "sync", "edge", "cloud"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for name in re.findall(r"""(?:environ\.\w+\(|environ\[|getenv\()(["']?\w+)""", text):
                constant = re.search(rf"^{name}\b.* = [\"'](\w+)", text, re.MULTILINE)
                found.add(constant[1] if constant else name.strip("\"'"))
    assert found == set(ENVIRONMENT)


@dataclass(frozen=True)
class _Inner:
    names: tuple[str, ...] = ("b",)  # who


@dataclass(frozen=True)
class _Sample:
    wait_s: float = 1.5  # 0..600: time to wait
    # 1..: most rows,
    rows: int = dataclasses.field(kw_only=True)  # of all models
    inner: _Inner = field(default_factory=lambda: _Inner(names=("a",)))  # who else


@dataclass(frozen=True)
class _Silent:
    silent: int
