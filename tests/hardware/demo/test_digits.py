"""The stages of `digits` are what the tour says they are."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch

from common.tensorfile import read_tensors
from common.tensors import Array
from hardware.demo.command import register
from hardware.demo.digits import STAGES, factory, parameters
from hardware.demo.prepare import digits_data

Checkpoints = dict[str, dict[str, Array]]


@pytest.fixture(scope="module")
def stages(digits_sources: dict[str, Path]) -> Checkpoints:
    return {stage: read_tensors(folder / "checkpoint.safetensors") for stage, folder in digits_sources.items()}


def logits(checkpoint: dict[str, Array], pixels: Array) -> Array:
    module = factory()
    module.load_state_dict({name: torch.from_numpy(array) for name, array in checkpoint.items()}, strict=True)
    with torch.inference_mode():
        return np.asarray(module.eval()(torch.from_numpy(pixels)).numpy())


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_reads_97_of_100_held_out_digits(stages: Checkpoints, stage: str) -> None:
    pixels, labels = digits_data()
    right = logits(stages[stage], pixels[1200:]).argmax(axis=1) == labels[1200:]
    assert right.mean() >= 0.97


def test_training_is_repeatable(stages: Checkpoints) -> None:
    pixels, labels = digits_data()
    torch.manual_seed(99)  # whatever the caller did with the global generator
    again = parameters("v2", pixels[:1200], labels[:1200])
    assert {name: array.tobytes() for name, array in again.items()} == {
        name: array.tobytes() for name, array in stages["v2"].items()
    }


def test_v2_changes_every_tensor_and_v3_only_the_last_layer(stages: Checkpoints) -> None:
    def changed(old: str, new: str) -> set[str]:
        return {name for name in stages[old] if not np.array_equal(stages[old][name], stages[new][name])}

    assert changed("v1", "v2") == set(stages["v1"])
    assert changed("v2", "v3") == {"last.weight", "last.bias"}
    assert changed("v3", "v4") == set(stages["v1"])


def test_collapsed_is_bit_for_bit_the_function_of_v3(stages: Checkpoints) -> None:
    pixels, _ = digits_data()
    np.testing.assert_array_equal(logits(stages["collapsed"], pixels), logits(stages["v3"], pixels))
    assert not np.array_equal(stages["collapsed"]["conv1.weight"], stages["v3"]["conv1.weight"])


def test_the_hidden_layer_has_nine_tenths_of_the_parameters(stages: Checkpoints) -> None:
    sizes = {name: array.size for name, array in stages["v1"].items()}
    assert sizes["hidden.weight"] > 0.9 * sum(sizes.values())
    assert sizes["last.weight"] + sizes["last.bias"] < 0.01 * sum(sizes.values())


def test_the_command_writes_a_folder_that_can_be_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["demo", "prepare", "digits", "--out", str(tmp_path / "d")])
    assert parsed.run(parsed) == 0
    assert "outrider model build" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == [
        "calibration.safetensors",
        "checkpoint.safetensors",
        "heldout.safetensors",
        "model.toml",
    ]
    calibration = {row.tobytes() for row in read_tensors(tmp_path / "d/calibration.safetensors")["pixels"]}
    heldout = read_tensors(tmp_path / "d/heldout.safetensors")
    assert not calibration & {row.tobytes() for row in heldout["pixels"]}
    assert heldout["labels"].shape == (597,)
