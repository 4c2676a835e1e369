import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.bundle import Bundle, Variant
from common.errors import BundleError, EngineError, IncompatibleRelease, InvalidRequest, ModelNotReady
from common.request import Request
from common.serving.engine import Batch
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


# --- after the swap ---


def served(one: EngineInstaller, folder: Path, version: str, weight: Any = WEIGHT) -> Any:
    prepared = one.prepare(replace(staged(write_bundle(folder, weight=weight)), version=version))
    one.activate(prepared)
    return prepared


def test_the_engine_before_stays_open_until_the_new_one_is_settled(tmp_path: Path) -> None:
    one, repository = installer()
    first = served(one, tmp_path / "1", "1")
    one.settle("linear")
    second = served(one, tmp_path / "2", "2")
    first.loaded.engine.run(Batch(({"x": np.zeros((1, 2), np.float32)},), 1))  # open still
    assert one.revert("linear")
    assert repository.current("linear") is first.loaded
    with pytest.raises(EngineError, match="closed"):
        second.loaded.engine.run(None)
    assert not one.revert("linear")  # there is nothing before it any more
    third = served(one, tmp_path / "3", "3")
    one.settle("linear")
    with pytest.raises(EngineError, match="closed"):
        first.loaded.engine.run(None)
    assert repository.current("linear") is third.loaded


def test_requests_that_pinned_the_engine_before_end_on_it_whatever_happens(tmp_path: Path) -> None:
    one, repository = installer()
    first = served(one, tmp_path / "1", "1")
    lease = repository.lease("linear")
    served(one, tmp_path / "2", "2")
    assert one.revert("linear")
    second = repository.lease("linear")
    served(one, tmp_path / "3", "3")
    one.settle("linear")
    lease.release()
    first.loaded.engine.run(Batch(({"x": np.zeros((1, 2), np.float32)},), 1))  # the second lease holds it
    second.release()
    with pytest.raises(EngineError, match="closed"):
        first.loaded.engine.run(None)


def test_a_model_that_is_withdrawn_has_no_engine_and_cannot_be_loaded(tmp_path: Path) -> None:
    one, repository = installer()
    first = served(one, tmp_path / "1", "1")
    one.withdraw("linear", "version 1 was refused: it fails")
    with pytest.raises(ModelNotReady, match="it fails"):
        repository.lease("linear")
    with pytest.raises(ModelNotReady):
        asyncio.run(repository.load("linear"))
    with pytest.raises(EngineError, match="closed"):
        first.loaded.engine.run(None)
    served(one, tmp_path / "2", "2")
    assert repository.readiness("linear") is Readiness.READY


async def test_vitals_count_answers_and_the_engines_own_failures(tmp_path: Path) -> None:
    async with LocalServing("edge", EngineOptions(), by="node") as local:
        served(local.installer, tmp_path / "1", "1")
        served(local.installer, tmp_path / "2", "2")
        x = np.zeros((1, 2), np.float32)
        for _ in range(4):
            await local.target.infer(Request(model="linear", inputs={"x": x}))
        with pytest.raises(InvalidRequest):
            await local.target.infer(Request(model="linear", inputs={"y": x}))
        loaded = local.repository.current("linear")
        assert loaded is not None
        loaded.engine.close()  # as if the accelerator were gone
        for _ in range(2):
            with pytest.raises(EngineError):
                await local.target.infer(Request(model="linear", inputs={"x": x}))
        found = local.installer.vitals("linear")
        assert found is not None
        now, before = found
        assert (now.version, now.answers, now.errors) == ("2", 4, 2)
        assert now.latency_s is not None
        assert 0 < now.latency_s < 1
        assert before is not None
        assert (before.version, before.calls, before.latency_s) == ("1", 0, None)
        verdict = await asyncio.to_thread(local.installer.recheck, "linear")
        assert verdict is not None
        assert "does not run" in verdict.detail


async def test_an_engine_that_is_kept_for_a_revert_is_closed_with_the_process(tmp_path: Path) -> None:
    async with LocalServing("edge", EngineOptions(), by="node") as local:
        engines = [served(local.installer, tmp_path / version, version).loaded.engine for version in "12"]
    for engine in engines:
        with pytest.raises(EngineError, match="closed"):
            engine.run(None)


async def test_a_busy_engine_is_not_judged(tmp_path: Path) -> None:
    async with LocalServing("edge", EngineOptions(), by="node", max_queue_rows=4) as local:
        await local.serve_bundle(
            write_bundle(tmp_path), "1"
        )  # 16 golden rows in batches of 8: more than the queue takes
        assert await asyncio.to_thread(local.installer.recheck, "linear") is None
        assert local.installer.vitals("other") is None
