"""A bundle built as the successor of another: scales that stay, scales that cannot, what the report says."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from common.errors import BuildError
from common.tensorfile import read_tensors, write_tensors
from common.tensors import Array
from hardware.build.build import build
from hardware.build.report import read_report, render
from hardware.build.spec import ModelSpec, Source
from tests.hardware.build.conftest import Prepared

LIMITS = {"cpu-int8": 64, "trt-int8": 127}  # 7 bits and 8 bits, symmetric
WEIGHTS = ("conv1.weight", "conv2.weight", "hidden.weight", "last.weight")


def constants(bundle: Path, variant: str) -> dict[str, Array]:
    graph = onnx.load(bundle / variant / "model.onnx").graph
    return {item.name: numpy_helper.to_array(item) for item in graph.initializer}


def per_row(tensor: Array, steps: Array) -> Array:
    return tensor.reshape(len(tensor), -1) / steps[:, None]


def trained(digits: Prepared, checkpoint: dict[str, Array], folder: Path) -> ModelSpec:
    write_tensors(folder / "checkpoint.safetensors", checkpoint)
    assert digits.spec.source.factory is not None
    source = Source(factory=digits.spec.source.factory, checkpoint=str(folder / "checkpoint.safetensors"))
    return dataclasses.replace(digits.spec, source=source)


def test_small_updates_keep_every_scale(bundle_v2: Path, digits_v2: Prepared, tmp_path: Path) -> None:
    before = read_tensors(digits_v2.folder / "checkpoint.safetensors")
    after = {name: tensor.copy() for name, tensor in before.items()}
    random = np.random.default_rng(3)
    for name in WEIGHTS:
        after[name] += (random.standard_normal(after[name].shape) * 2e-4).astype(np.float32)
    hidden = np.abs(after["hidden.weight"][7])
    loudest = int(hidden.argmax())  # grows beyond its range: 1.5 steps of 127, so it rounds to 65 of 64
    after["hidden.weight"][7, loudest] *= (127 + 1.5) / 127

    report = build(trained(digits_v2, after, tmp_path), digits_v2.folder, tmp_path / "next", successor_of=bundle_v2)

    for variant, limit in LIMITS.items():
        old, new = constants(bundle_v2, variant), constants(tmp_path / "next", variant)
        scales = [name for name in new if name.endswith("_scale")]
        assert len(scales) >= 9
        for name in scales:  # weights, activations, and where there are any the int32 biases
            np.testing.assert_array_equal(new[name], old[name], err_msg=name)
        changed = total = clipped = 0
        for name in WEIGHTS:
            steps = np.abs(before[name].reshape(len(before[name]), -1)).max(axis=1) / limit
            np.testing.assert_allclose(new[f"{name}_scale"], steps, rtol=1e-6)
            rounded = np.rint(per_row(after[name], old[f"{name}_scale"]))
            wanted = np.clip(rounded, -limit, limit)
            if name == "hidden.weight":
                clipped = int((np.abs(rounded) > limit).sum())
            stored = new[f"{name}_quantized"]
            np.testing.assert_array_equal(stored.reshape(len(stored), -1), wanted, err_msg=name)
            changed += int((stored != old[f"{name}_quantized"]).sum())
            total += stored.size
        assert abs(new["hidden.weight_quantized"][7, loudest]) == limit

        said = report.variant(variant).scales
        assert said is not None
        assert said.is_kept
        assert all(one.kept == one.channels and not one.reason for one in said.tensors), said.tensors
        assert {one.name for one in said.tensors if one.kind == "weight"} == set(WEIGHTS)
        hidden_said = next(one for one in said.tensors if one.name == "hidden.weight")
        assert clipped > 0
        assert hidden_said.clipped_share == pytest.approx(clipped / (256 * 1024))
        assert hidden_said.drift is not None
        assert 128.4 / 127 < hidden_said.drift < 129 / 127
        assert said.changed_share == pytest.approx(changed / total)
        assert said.changed_share_recomputed is not None
        assert said.changed_share < said.changed_share_recomputed
        assert said.delta_bytes is not None
        assert said.delta_bytes_recomputed is not None
        assert said.delta_bytes < said.delta_bytes_recomputed
        assert report.variant(variant).tries == 1
    assert read_report(tmp_path / "next") == report
    assert "the predecessor's for 9 of 9 tensors" in render(report)


def test_a_channel_that_drifted_gets_a_scale_of_its_own(bundle_v2: Path, digits_v2: Prepared, tmp_path: Path) -> None:
    checkpoint = read_tensors(digits_v2.folder / "checkpoint.safetensors")
    checkpoint["conv2.weight"][5] *= 3
    checkpoint["conv2.weight"][6] *= 0.25
    report = build(
        trained(digits_v2, checkpoint, tmp_path), digits_v2.folder, tmp_path / "next", successor_of=bundle_v2
    )
    for variant, limit in LIMITS.items():
        old, new = constants(bundle_v2, variant), constants(tmp_path / "next", variant)
        ratio = new["conv2.weight_scale"] / old["conv2.weight_scale"]
        wanted = np.ones(64)
        wanted[5], wanted[6] = 3, 0.25
        np.testing.assert_allclose(ratio, wanted, rtol=1e-6)
        assert (ratio == 1).sum() == 62
        stored = new["conv2.weight_quantized"]
        np.testing.assert_array_equal(stored, old["conv2.weight_quantized"])  # each row as its own scale sees it
        assert np.abs(stored[5].astype(int)).max() == limit
        said = next(one for one in report.variant(variant).scales.tensors if one.name == "conv2.weight")  # type: ignore[union-attr]
        assert (said.kept, said.channels) == (62, 64)
        assert said.drift == pytest.approx(0.25)
        assert "outside the old range: 1 of 64" in said.reason
        assert "less than 0.5 of the old range: 1 of 64" in said.reason
    assert_bias_scales_are_products(tmp_path / "next" / "cpu-int8" / "model.onnx")


def assert_bias_scales_are_products(path: Path) -> None:
    """Integer kernels add an int32 bias to the sum of products, so its scale is that of input times weight."""
    graph = onnx.load(path).graph
    values = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    makers = {output: node for node in graph.node for output in node.output}
    seen = 0
    for node in graph.node:
        if node.op_type in ("Conv", "Gemm"):
            given, weight, bias = (values[makers[tensor].input[1]] for tensor in node.input)
            np.testing.assert_allclose(bias, given * weight, rtol=1e-6)
            assert values[makers[node.input[2]].input[0]].dtype == np.int32
            seen += 1
    assert seen == 4


def test_where_the_gate_does_not_hold_the_scales_are_recomputed(
    bundle_v2: Path, digits_v2: Prepared, tmp_path: Path
) -> None:
    """A predecessor whose tensors were 1.9 times as wide: its scales fit by the rule, and lose most of a bit each."""
    wide = read_tensors(digits_v2.folder / "checkpoint.safetensors")
    wide["conv1.weight"] *= np.float32(1.9)
    for name in ("conv1.bias", "conv2.bias", "hidden.bias", "last.bias"):
        wide[name] *= np.float32(1.9)
    build(trained(digits_v2, wide, tmp_path), digits_v2.folder, tmp_path / "wide")

    loose = digits_v2.with_gate(metric="cosine", max_drop=0.5)
    kept = build(loose, digits_v2.folder, tmp_path / "loose", successor_of=tmp_path / "wide").variant("cpu-int8")
    assert kept.scales is not None
    assert kept.scales.is_kept
    assert all(one.kept == one.channels for one in kept.scales.tensors)

    tight = digits_v2.with_gate(metric="cosine", max_drop=0.7 * kept.loss.value)
    report = build(tight, digits_v2.folder, tmp_path / "tight", successor_of=tmp_path / "wide")
    cpu = report.variant("cpu-int8")
    assert cpu.loss.value <= 0.7 * kept.loss.value
    assert (cpu.is_within_gate, cpu.float_layers, cpu.tries) == (True, (), 2)
    assert cpu.scales is not None
    assert not cpu.scales.is_kept
    assert f"with the predecessor's the loss is {kept.loss.value:.4f}" in cpu.scales.reason
    assert {one.reason for one in cpu.scales.tensors if one.kept < one.channels} == {"the gate"}
    alone = (bundle_v2 / "cpu-int8/model.onnx").read_bytes()
    assert (tmp_path / "tight/cpu-int8/model.onnx").read_bytes() == alone  # as without a predecessor
    assert (tmp_path / "loose/cpu-int8/model.onnx").read_bytes() != alone


def test_a_predecessor_without_the_variants_scales_is_said_so(
    bundle_v2: Path, digits_v2: Prepared, tmp_path: Path
) -> None:
    shutil.copytree(bundle_v2, tmp_path / "old")
    spec = json.loads((tmp_path / "old/bundle.json").read_text())
    spec["variants"] = [one for one in spec["variants"] if one["name"] != "trt-int8"]
    (tmp_path / "old/bundle.json").write_text(json.dumps(spec))
    shutil.copyfile(tmp_path / "old/full/model.onnx", tmp_path / "old/cpu-int8/model.onnx")  # nothing quantized
    report = build(digits_v2.spec, digits_v2.folder, tmp_path / "next", successor_of=tmp_path / "old")
    trt, cpu = (report.variant(name).scales for name in ("trt-int8", "cpu-int8"))
    assert trt is not None
    assert (trt.is_kept, trt.reason, trt.tensors) == (False, "the predecessor has no variant 'trt-int8'", ())
    assert cpu is not None
    assert (cpu.is_kept, cpu.reason) == (False, "none of the predecessor's fits")
    assert {one.reason for one in cpu.tensors} == {"not quantized in the predecessor"}
    for variant in LIMITS:
        name = f"{variant}/model.onnx"
        assert (tmp_path / "next" / name).read_bytes() == (bundle_v2 / name).read_bytes()
    assert "trt-int8: scales: recomputed, the predecessor has no variant 'trt-int8'" in render(report)


def test_a_first_build_says_nothing_of_scales(bundle_v2: Path) -> None:
    report = read_report(bundle_v2)
    assert [one.scales for one in report.variants] == [None, None, None]
    assert "scales" not in render(report)


def test_what_is_no_predecessor_is_refused_before_anything_is_built(
    bundle_v2: Path, digits_v2: Prepared, tmp_path: Path
) -> None:
    def refusal(predecessor: Path, spec: ModelSpec = digits_v2.spec) -> str:
        with pytest.raises(BuildError) as caught:
            build(spec, tmp_path / "no data here", tmp_path / "out/next", successor_of=predecessor)
        assert list((tmp_path / "out").iterdir()) == []
        return str(caught.value)

    assert "accepted: a bundle folder that `outrider model build` wrote" in refusal(tmp_path / "missing")
    other = dataclasses.replace(digits_v2.spec, name="letters")
    assert "model 'digits', not 'letters'; accepted: an earlier bundle" in refusal(bundle_v2, other)
    shutil.copytree(bundle_v2, tmp_path / "old")
    (tmp_path / "old/cpu-int8/model.onnx").write_bytes(b"not a model")
    assert "not a valid ONNX model" in refusal(tmp_path / "old")
    (tmp_path / "old/cpu-int8/model.onnx").unlink()
    assert "cannot be read" in refusal(tmp_path / "old")
    (tmp_path / "old/bundle.json").unlink()
    assert "bundle.json cannot be read" in refusal(tmp_path / "old")
