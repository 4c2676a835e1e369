"""A torch model becomes the same function in ONNX, or is refused."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from common.errors import BuildError
from common.tensorfile import read_tensors, write_tensors
from hardware.build.export import check_parity, export_onnx, load_module
from hardware.build.spec import Source
from tests.hardware.build.conftest import Fp32, Prepared


def test_the_export_has_opset_17_and_takes_any_batch(fp32: Fp32) -> None:
    assert [(item.domain, item.version) for item in onnx.load(fp32.onnx).opset_import] == [("", 17)]
    session = ort.InferenceSession(str(fp32.onnx), providers=["CPUExecutionProvider"])
    for rows in (1, 3, 17):
        (logits,) = session.run(None, {"pixels": np.zeros((rows, 1, 8, 8), np.float32)})
        assert logits.shape == (rows, 10)


def test_the_exports_answers_are_torchs(fp32: Fp32, digits_v2: Prepared) -> None:
    module = load_module(digits_v2.spec.source, digits_v2.folder)
    (feeds,) = fp32.heldout.take(np.arange(20)).feeds(20)
    with torch.inference_mode():
        wanted = module(torch.from_numpy(feeds["pixels"])).numpy()
    session = ort.InferenceSession(str(fp32.onnx), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, feeds)[0], wanted, atol=1e-4)


def test_an_export_that_computes_something_else_is_refused(
    fp32: Fp32, digits_v2: Prepared, digits_v3: Prepared
) -> None:
    other = load_module(digits_v3.spec.source, digits_v3.folder)
    with pytest.raises(BuildError, match="differs from torch"):
        check_parity(other, fp32.onnx, digits_v2.spec, fp32.heldout)


def test_a_pickle_under_a_safe_name_is_refused_without_unpickling(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (str(tmp_path / "ran"),)

    (tmp_path / "c.safetensors").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(BuildError, match="safetensors"):
        load_module(Source(factory="hardware.demo.digits:factory", checkpoint="c.safetensors"), tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_with_a_missing_tensor_is_refused(tmp_path: Path, digits_v2: Prepared) -> None:
    tensors = read_tensors(digits_v2.folder / "checkpoint.safetensors")
    del tensors["last.bias"]
    write_tensors(tmp_path / "checkpoint.safetensors", tensors)
    with pytest.raises(BuildError, match=r"last\.bias"):
        load_module(digits_v2.spec.source, tmp_path)


@pytest.mark.parametrize(
    "factory", ["no.such.place:factory", "hardware.demo.digits:nothing", "hardware.demo.digits:STAGES", "json:loads"]
)
def test_a_factory_that_makes_no_module_is_refused(tmp_path: Path, factory: str) -> None:
    with pytest.raises(BuildError, match="factory"):
        load_module(Source(factory=factory, checkpoint="c.safetensors"), tmp_path)


def linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 3)


def test_the_factorys_module_gets_the_checkpoint_and_is_in_eval_mode(tmp_path: Path) -> None:
    write_tensors(tmp_path / "c.safetensors", {"weight": np.ones((3, 2), np.float32), "bias": np.zeros(3, np.float32)})
    module = load_module(Source(factory=f"{__name__}:linear", checkpoint="c.safetensors"), tmp_path)
    assert not module.training
    assert module(torch.ones(1, 2)).tolist() == [[2.0, 2.0, 2.0]]


def test_a_module_that_cannot_be_traced_is_refused(tmp_path: Path, fp32: Fp32, digits_v2: Prepared) -> None:
    spec = dataclasses.replace(digits_v2.spec)
    with pytest.raises(BuildError, match="cannot be exported"):
        export_onnx(torch.nn.Linear(3, 3), spec, fp32.heldout, tmp_path / "m.onnx")
