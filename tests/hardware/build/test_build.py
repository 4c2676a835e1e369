"""From model.toml to a bundle: what is in it, when it is refused, and what the next version changes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from common.bundle import Bundle, files_of
from common.errors import BuildError, CalibrationMissing, GateRefused
from common.tensorfile import read_tensors, write_tensors
from common.tensors import Array
from hardware.build.build import build
from hardware.build.report import read_report
from hardware.build.spec import Source
from hardware.gate import judge
from tests.hardware.build.conftest import Prepared


def answers(bundle: Bundle, variant: str, pixels: Array) -> Array:
    session = ort.InferenceSession(str(bundle.file(f"{variant}/model.onnx")), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"pixels": pixels})[0])


def true_accuracy(bundle: Bundle, variant: str, prepared: Prepared) -> float:
    heldout = read_tensors(prepared.folder / "heldout.safetensors")
    return float(np.mean(answers(bundle, variant, heldout["pixels"]).argmax(axis=1) == heldout["labels"]))


def constants(path: Path) -> dict[str, bytes]:
    return {item.name: numpy_helper.to_array(item).tobytes() for item in onnx.load(path).graph.initializer}


def test_the_bundle_holds_three_variants_in_order_and_every_file_they_name(bundle_v2: Path) -> None:
    spec = Bundle.open(bundle_v2).spec
    assert [(one.name, one.files) for one in spec.variants] == [
        ("trt-int8", {"tensorrt": ("trt-int8/model.onnx",)}),
        ("cpu-int8", {"onnxruntime": ("cpu-int8/model.onnx",)}),
        ("full", {"torch": ("full/model.safetensors",), "onnxruntime": ("full/model.onnx",)}),
    ]
    assert all((bundle_v2 / name).is_file() for name in files_of(spec))
    on_disk = {str(path.relative_to(bundle_v2)) for path in bundle_v2.rglob("*") if path.is_file()}
    assert on_disk == {*files_of(spec), "report.json"}


def test_int8_loses_at_most_a_point_of_true_accuracy(bundle_v2: Path, digits_v2: Prepared) -> None:
    bundle = Bundle.open(bundle_v2)
    full, int8 = (true_accuracy(bundle, variant, digits_v2) for variant in ("full", "cpu-int8"))
    assert full >= 0.97
    assert full - int8 <= 0.01


def test_the_report_says_what_was_measured(bundle_v2: Path, digits_v2: Prepared) -> None:
    report = read_report(bundle_v2)
    assert (report.calibration_rows, report.heldout_rows) == (512, 597)
    cpu, bundle = report.variant("cpu-int8"), Bundle.open(bundle_v2)
    lost = true_accuracy(bundle, "full", digits_v2) - true_accuracy(bundle, "cpu-int8", digits_v2)
    assert cpu.loss.value == pytest.approx(lost)
    assert cpu.loss.low <= cpu.loss.value <= cpu.loss.high
    assert cpu.size_bytes == (bundle_v2 / "cpu-int8/model.onnx").stat().st_size < 350_000
    assert [layer.op for layer in cpu.layers] == ["Conv", "Conv", "Gemm", "Gemm"]
    assert cpu.speed is not None
    assert report.variant("trt-int8").is_simulated
    assert report.variant("trt-int8").speed is None


def test_every_variant_passes_its_own_golden_gate(bundle_v2: Path) -> None:
    bundle = Bundle.open(bundle_v2)
    golden = bundle.golden()
    assert 8 <= len(golden["input.pixels"]) <= 32
    for variant in ("trt-int8", "cpu-int8", "full"):
        outputs = {"logits": answers(bundle, variant, golden["input.pixels"])}
        assert judge(bundle.spec, variant, golden, outputs).passed


def test_golden_rows_are_held_out_rows_with_fp32s_answers(bundle_v2: Path, digits_v2: Prepared) -> None:
    golden = Bundle.open(bundle_v2).golden()
    heldout = {row.tobytes() for row in read_tensors(digits_v2.folder / "heldout.safetensors")["pixels"]}
    assert {row.tobytes() for row in golden["input.pixels"]} <= heldout
    wanted = answers(Bundle.open(bundle_v2), "full", golden["input.pixels"])
    np.testing.assert_allclose(golden["output.logits"], wanted, atol=1e-4)


def test_the_same_inputs_give_the_same_bytes(bundle_v2: Path, digits_v2: Prepared, tmp_path: Path) -> None:
    build(digits_v2.spec, digits_v2.folder, tmp_path / "again")
    for path in bundle_v2.rglob("*"):
        if path.is_file() and path.name != "report.json":
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(bundle_v2)).read_bytes(), path


def test_training_the_last_layer_changes_no_other_tensor(bundle_v2: Path, digits_v3: Prepared, tmp_path: Path) -> None:
    build(digits_v3.spec, digits_v3.folder, tmp_path / "v3", successor_of=bundle_v2)
    for variant in ("cpu-int8", "trt-int8", "full"):
        before = constants(bundle_v2 / variant / "model.onnx")
        after = constants(tmp_path / "v3" / variant / "model.onnx")
        assert before.keys() == after.keys()
        changed = {name for name in before if before[name] != after[name]}
        assert changed
        assert all(name.startswith(("last.", "/last/", "logits")) for name in changed), changed
        assert sum(len(after[name]) for name in changed) < 0.02 * sum(map(len, after.values()))


def test_a_collapsed_model_is_refused_and_leaves_nothing(collapsed: Prepared, tmp_path: Path) -> None:
    with pytest.raises(GateRefused) as caught:
        build(collapsed.spec, collapsed.folder, tmp_path / "out")
    assert caught.value.loss > 0.5
    assert {"/conv1/Conv", "/conv2/Conv"} <= set(caught.value.worst_layers[:3])
    assert "25%" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_forced_build_is_refused_by_every_nodes_golden_gate(collapsed: Prepared, tmp_path: Path) -> None:
    report = build(collapsed.spec, collapsed.folder, tmp_path / "forced", skip_gate=True)
    assert report.is_gate_skipped
    assert not report.variant("cpu-int8").is_within_gate
    bundle = Bundle.open(tmp_path / "forced")
    golden = bundle.golden()
    passed = {
        variant: judge(
            bundle.spec, variant, golden, {"logits": answers(bundle, variant, golden["input.pixels"])}
        ).passed
        for variant in ("trt-int8", "cpu-int8", "full")
    }
    assert passed == {"trt-int8": False, "cpu-int8": False, "full": True}


def test_a_model_that_mixed_precision_can_save_is_built(digits_v2: Prepared, tmp_path: Path) -> None:
    spec = _with_loud_hidden_unit(digits_v2, tmp_path)
    report = build(spec, tmp_path, tmp_path / "bundle")
    cpu = report.variant("cpu-int8")
    assert cpu.is_within_gate
    assert set(cpu.float_layers) == {"/hidden/Gemm", "/last/Gemm"}  # what reads and what writes the loud tensor
    assert cpu.float_share == pytest.approx((262144 + 2560) / 1462784)
    assert cpu.tries == 3

    with pytest.raises(GateRefused, match=r"worst layers: /last/Gemm, /hidden/Gemm"):
        build(_with_share(spec, 0.1), tmp_path, tmp_path / "refused")


def test_a_successor_starts_from_what_its_predecessor_left_in_float(digits_v2: Prepared, tmp_path: Path) -> None:
    spec = _with_loud_hidden_unit(digits_v2, tmp_path)
    build(spec, tmp_path, tmp_path / "first")
    report = build(digits_v2.spec, digits_v2.folder, tmp_path / "second", successor_of=tmp_path / "first")
    cpu = report.variant("cpu-int8")
    assert set(cpu.float_layers) == {"/hidden/Gemm", "/last/Gemm"}
    assert cpu.tries == 1

    less = digits_v2.with_gate(float_layers=("/conv1/Conv",), max_float_share=0.1)  # what was left is now too much
    report = build(less, digits_v2.folder, tmp_path / "third", successor_of=tmp_path / "first")
    assert report.variant("cpu-int8").float_layers == ("/conv1/Conv",)


def test_layers_named_in_the_spec_stay_in_float(digits_v2: Prepared, tmp_path: Path) -> None:
    report = build(digits_v2.with_gate(float_layers=("/conv1/Conv",)), digits_v2.folder, tmp_path / "bundle")
    assert report.variant("cpu-int8").float_layers == ("/conv1/Conv",)
    with pytest.raises(BuildError, match="/conv9/Conv"):
        build(digits_v2.with_gate(float_layers=("/conv9/Conv",)), digits_v2.folder, tmp_path / "other")
    with pytest.raises(BuildError, match=r"80\.6% of the MACs"):
        build(digits_v2.with_gate(float_layers=("/conv2/Conv",)), digits_v2.folder, tmp_path / "other")


def test_an_onnx_file_alone_is_enough(bundle_v2: Path, digits_v2: Prepared, tmp_path: Path) -> None:
    source = bundle_v2 / "full/model.onnx"
    spec = dataclasses.replace(digits_v2.spec, source=Source(onnx=str(source)))
    report = build(spec, digits_v2.folder, tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.variant("full").files == {"onnxruntime": ("full/model.onnx",)}
    assert bundle.file("full/model.onnx").read_bytes() == source.read_bytes()
    assert bundle.file("cpu-int8/model.onnx").read_bytes() == (bundle_v2 / "cpu-int8/model.onnx").read_bytes()
    assert report.parity is None


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x08\x12\x04"])
def test_a_file_that_is_no_onnx_model_is_refused(digits_v2: Prepared, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    spec = dataclasses.replace(digits_v2.spec, source=Source(onnx=str(tmp_path / "m.onnx")))
    with pytest.raises(BuildError, match=r"m\.onnx"):
        build(spec, digits_v2.folder, tmp_path / "bundle")


def test_an_onnx_file_with_other_names_is_refused(bundle_v2: Path, digits_v2: Prepared, tmp_path: Path) -> None:
    spec = dataclasses.replace(
        digits_v2.spec,
        source=Source(onnx=str(bundle_v2 / "full/model.onnx")),
        outputs=(dataclasses.replace(digits_v2.spec.outputs[0], name="scores"),),
    )
    with pytest.raises(BuildError, match="scores"):
        build(spec, digits_v2.folder, tmp_path / "bundle")


def test_no_calibration_is_an_error(digits_v2: Prepared, tmp_path: Path) -> None:
    with pytest.raises(CalibrationMissing):
        build(dataclasses.replace(digits_v2.spec, calibration=None), digits_v2.folder, tmp_path / "bundle")


def test_labels_must_name_every_class(digits_v2: Prepared, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("zero\none\n", encoding="utf-8")
    spec = dataclasses.replace(digits_v2.spec, labels=str(tmp_path / "labels.txt"))
    with pytest.raises(BuildError, match="2 lines"):
        build(spec, digits_v2.folder, tmp_path / "bundle")


def test_without_labels_the_gate_asks_fp32s_posterior(digits_v2: Prepared, tmp_path: Path) -> None:
    heldout = read_tensors(digits_v2.folder / "heldout.safetensors")
    write_tensors(tmp_path / "heldout.safetensors", {"pixels": heldout["pixels"]})
    spec = dataclasses.replace(
        digits_v2.with_gate(metric=None),
        holdout=dataclasses.replace(digits_v2.spec.holdout, file=str(tmp_path / "heldout.safetensors")),
    )
    report = build(spec, digits_v2.folder, tmp_path / "bundle")
    assert report.variant("cpu-int8").loss.metric == "expected_accuracy"
    assert Bundle.open(tmp_path / "bundle").spec.golden.metric == "expected_accuracy"
    embedding = dataclasses.replace(spec, task="embedding")
    assert build(embedding, digits_v2.folder, tmp_path / "e").variant("cpu-int8").loss.metric == "cosine"
    with pytest.raises(BuildError, match="labels"):
        build(
            dataclasses.replace(spec, gate=dataclasses.replace(spec.gate, metric="accuracy")),
            digits_v2.folder,
            tmp_path / "a",
        )


def test_an_earlier_bundle_is_replaced_and_anything_else_is_left_alone(digits_v2: Prepared, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    build(digits_v2.spec, digits_v2.folder, out)
    (out / "stale").touch()
    build(digits_v2.spec, digits_v2.folder, out)
    assert not (out / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").touch()
    with pytest.raises(BuildError, match="no bundle"):
        build(digits_v2.spec, digits_v2.folder, tmp_path / "mine")


def test_a_predecessor_without_a_report_is_an_error(digits_v2: Prepared, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(BuildError, match=r"report\.json"):
        build(digits_v2.spec, digits_v2.folder, tmp_path / "bundle", successor_of=tmp_path / "old")
    (tmp_path / "old/report.json").write_text(json.dumps({"model": 1}), encoding="utf-8")
    with pytest.raises(BuildError, match=r"report\.json"):
        build(digits_v2.spec, digits_v2.folder, tmp_path / "bundle", successor_of=tmp_path / "old")


def _with_loud_hidden_unit(digits: Prepared, folder: Path):  # type: ignore[no-untyped-def]
    """The same function, but one of the 256 hidden units is 2^14 times as large and `last` scales it back."""
    tensors = read_tensors(digits.folder / "checkpoint.safetensors")
    unit = int(np.abs(tensors["last.weight"]).sum(axis=0).argmax())
    for name in ("hidden.weight", "hidden.bias"):
        tensors[name][unit] *= 2.0**14
    tensors["last.weight"][:, unit] /= 2.0**14
    write_tensors(folder / "checkpoint.safetensors", tensors)
    for name in ("calibration.safetensors", "heldout.safetensors"):
        (folder / name).write_bytes((digits.folder / name).read_bytes())
    return digits.spec


def _with_share(spec, share: float):  # type: ignore[no-untyped-def]
    return dataclasses.replace(spec, gate=dataclasses.replace(spec.gate, max_float_share=share))
