from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.bundle import Bundle, Variant
from common.errors import BundleError, EngineError, IncompatibleRelease
from common.request import Request
from common.serving.repository import Installed, Repository
from common.serving.target import Readiness
from hardware.install import EngineInstaller, EngineOptions, Opener
from hardware.serving import LocalServing
from tests.bundles import WEIGHT, forward, write_bundle

CPU_INT8 = Variant(name="cpu-int8", files={"onnxruntime": ("cpu-int8/model.onnx",)})


def staged(folder: Path, variant: str = "cpu-int8") -> Installed:
    return Installed(model="linear", version="3", folder=folder, variant=variant, engine="onnxruntime")


def installer(options: EngineOptions | None = None) -> tuple[EngineInstaller, Repository]:
    options = options or EngineOptions()
    repository = Repository(Opener(options), lambda engine: engine.close())
    return EngineInstaller(repository, options), repository


def test_a_good_release_is_prepared_passes_its_gate_and_serves(tmp_path: Path) -> None:
    one, repository = installer()
    prepared = one.prepare(staged(write_bundle(tmp_path)))
    assert repository.readiness("linear") is Readiness.BUILDING
    verdict = one.gate(prepared)
    assert verdict.passed, verdict.detail
    one.activate(prepared)
    current = repository.current("linear")
    assert current is not None
    assert (current.version, current.labels) == ("3", ("left", "right", "middle"))


def test_an_engines_identity_is_that_of_the_files_that_answer(tmp_path: Path) -> None:
    one, _ = installer()

    def identity(folder: str, **bundle: Any) -> str:
        return one.prepare(staged(write_bundle(tmp_path / folder, **bundle))).loaded.identity

    first = identity("first")
    assert len(first) == 64
    assert identity("the same") == first
    assert identity("other weights", weight=WEIGHT * 10) != first
    assert identity("other rules", max_batch=4) != first
    relabelled = write_bundle(tmp_path / "labels")
    (relabelled / "labels.txt").write_text("a\nb\nc\n")
    assert one.prepare(staged(relabelled)).loaded.identity != first


def test_an_engine_that_answers_otherwise_than_fp32_fails_the_gate_and_the_old_one_serves_on(tmp_path: Path) -> None:
    one, repository = installer()
    good = one.prepare(staged(write_bundle(tmp_path / "good")))
    one.activate(good)
    bad = one.prepare(staged(write_bundle(tmp_path / "bad", int8_weight=WEIGHT[:, ::-1].copy())))
    verdict = one.gate(bad)
    assert not verdict.passed
    assert "expected_accuracy loss" in verdict.detail
    one.discard(bad)
    assert repository.current("linear") is good.loaded
    assert repository.readiness("linear") is Readiness.READY
    with pytest.raises(EngineError, match="closed"):
        bad.loaded.engine.run(None)  # type: ignore[arg-type]


def test_an_engine_that_answers_nan_fails_the_gate(tmp_path: Path) -> None:
    one, _ = installer()
    nan = np.full_like(WEIGHT, np.nan)
    assert not one.gate(one.prepare(staged(write_bundle(tmp_path, int8_weight=nan)))).passed


def test_the_gate_can_be_switched_off_for_drills(tmp_path: Path) -> None:
    one, _ = installer(EngineOptions(golden_gate=False))
    bad = one.prepare(staged(write_bundle(tmp_path, int8_weight=WEIGHT[:, ::-1].copy())))
    assert one.gate(bad).passed


@pytest.mark.parametrize(
    ("options", "engine", "expected"),
    [
        (EngineOptions(), "onnxruntime", True),
        (EngineOptions(), "tensorrt", False),  # not installed here
        (EngineOptions(variants=("full",)), "onnxruntime", False),
        (EngineOptions(engines=("torch",)), "onnxruntime", False),
    ],
)
def test_what_can_run_here_is_what_is_allowed_and_installed(
    options: EngineOptions, engine: str, expected: bool
) -> None:
    assert installer(options)[0].can_run("linear", engine, CPU_INT8) is expected


def test_torch_can_run_only_models_that_this_process_has_a_factory_for() -> None:
    full = Variant(name="full", files={"torch": ("full/model.safetensors",), "onnxruntime": ("full/model.onnx",)})
    options = EngineOptions(variants=("full",), engines=("torch", "onnxruntime"), factories={"known": "m:f"})
    one, _ = installer(options)
    assert one.can_run("known", "torch", full)
    assert not one.can_run("linear", "torch", full)
    assert one.can_run("linear", "onnxruntime", full)


def test_a_variant_that_needs_more_memory_than_there_is_cannot_run() -> None:
    huge = Variant(name="cpu-int8", files=CPU_INT8.files, min_memory_bytes=1 << 60)
    assert not installer()[0].can_run("linear", "onnxruntime", huge)


def test_a_release_that_does_not_open_says_why_in_the_index(tmp_path: Path) -> None:
    one, repository = installer()
    folder = write_bundle(tmp_path)
    (folder / "cpu-int8/model.onnx").write_bytes(b"not a model")
    with pytest.raises(EngineError, match="does not load"):
        one.prepare(staged(folder))
    assert repository.readiness("linear") is Readiness.ABSENT


def test_a_node_may_take_smaller_batches_than_the_model_but_not_larger(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, max_batch=8)
    for limit, expected in ((4, 4), (100, 8)):
        opened = Opener(EngineOptions(max_batch={"linear": limit}))(staged(folder))
        assert opened.config.max_batch == expected


async def test_a_bundle_folder_is_served_as_it_lies_there(tmp_path: Path) -> None:
    async with LocalServing("edge", EngineOptions(), by="node") as local:
        await local.serve_bundle(write_bundle(tmp_path), "7")
        x = np.array([[1.0, 2.0], [0.0, -1.0]], np.float32)
        response = await local.target.infer(Request(model="linear", inputs={"x": x}))
    np.testing.assert_allclose(response.outputs["logits"], forward(x), rtol=1e-6)
    assert (response.stamp.version, response.stamp.by) == ("7", "node")


async def test_a_bundle_that_fails_its_gate_or_fits_no_engine_is_not_served(tmp_path: Path) -> None:
    async with LocalServing("edge", EngineOptions(), by="node") as local:
        with pytest.raises(BundleError, match="golden gate"):
            await local.serve_bundle(write_bundle(tmp_path / "bad", int8_weight=-WEIGHT), "1")
        assert local.repository.current("linear") is None
    async with LocalServing("edge", EngineOptions(variants=("trt-int8",)), by="node") as local:
        with pytest.raises(IncompatibleRelease, match="no variant"):
            await local.serve_bundle(write_bundle(tmp_path / "good"), "1")


def test_a_bundle_with_a_file_name_that_leads_outside_is_refused(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path)
    text = (folder / "bundle.json").read_text()
    (folder / "bundle.json").write_text(text.replace("cpu-int8/model.onnx", "../outside.onnx"))
    with pytest.raises(BundleError, match=r"\.\./outside\.onnx"):
        Bundle.open(folder)
