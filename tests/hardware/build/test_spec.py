"""What model.toml may say, and the full path of the key in every refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from hardware.build.spec import ModelSpec, load_spec

GOOD = """\
name = "m"
task = "classification"
source = { onnx = "m.onnx" }
inputs = [{ name = "x", datatype = "FP32", shape = [-1, 2] }]
outputs = [{ name = "y", datatype = "FP32", shape = [-1, 3] }]
holdout = { file = "held.safetensors" }
"""


def load(tmp_path: Path, text: str) -> ModelSpec:
    (tmp_path / "model.toml").write_text(text, encoding="utf-8")
    return load_spec(tmp_path / "model.toml")


def test_defaults_are_those_of_the_readme(tmp_path: Path) -> None:
    spec = load(tmp_path, GOOD)
    assert (spec.gate.max_drop, spec.gate.max_float_share, spec.quantize) == (0.02, 0.25, "static")
    assert spec.config().inputs[0].shape == (-1, 2)


def test_an_unknown_key_is_named_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, GOOD + "[gate]\nmax_dorp = 0.1\n")
    assert caught.value.path == "gate.max_dorp"
    assert "max_drop" in caught.value.accepted


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.bin", "model.pkl"])
def test_a_pickled_checkpoint_is_refused_before_it_is_opened(tmp_path: Path, name: str) -> None:
    source = f'source = {{ factory = "a.b:c", checkpoint = "{name}" }}'  # no such file exists
    with pytest.raises(ConfigError, match="safetensors"):
        load(tmp_path, GOOD.replace('source = { onnx = "m.onnx" }', source))


@pytest.mark.parametrize(
    "source",
    [
        "source = { }",
        'source = { onnx = "m.onnx", factory = "a:b", checkpoint = "c.safetensors" }',
        'source = { factory = "a.b:c" }',
        'source = { factory = "a.b.c", checkpoint = "c.safetensors" }',
    ],
)
def test_a_source_is_one_thing_or_the_other(tmp_path: Path, source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, GOOD.replace('source = { onnx = "m.onnx" }', source))
    assert caught.value.path == "source"


@pytest.mark.parametrize("gate", ["max_drop = 1.5", "max_drop = -0.1", "max_float_share = 2.0", 'metric = "bleu"'])
def test_gate_values_out_of_range_are_refused(tmp_path: Path, gate: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, GOOD + f"[gate]\n{gate}\n")
    assert caught.value.path.startswith("gate")


def test_the_bundles_own_rules_hold_in_the_spec(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model name"):
        load(tmp_path, GOOD.replace('name = "m"', 'name = "../m"'))
