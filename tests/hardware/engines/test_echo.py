"""The echo engine and the bundle that `outrider model echo` writes for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.bundle import Bundle, ModelConfig
from common.errors import BuildError, EngineError
from common.serving.engine import Batch
from common.tensors import TensorSpec
from edge import CacheOptions, Node, NodeConfig, StaticModel
from hardware import engines
from hardware.build.echo import write_echo
from hardware.engines.base import EngineRequest
from hardware.install import EngineOptions


def tensor(name: str, *, datatype: str = "FP32", shape: tuple[int, ...] = (-1, 2)) -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, shape=shape)


def ask(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> EngineRequest:
    config = ModelConfig(name="echo", task="tensor", inputs=inputs, outputs=outputs)
    return EngineRequest(config=config, variant="full", files=())


def test_each_output_is_the_input_of_its_place_for_each_caller() -> None:
    request = ask((tensor("a"), tensor("b")), (tensor("first"), tensor("second")))
    engine = engines.open_engine("echo", request)
    one = {"a": np.float32([[1, 2]]), "b": np.float32([[3, 4]])}
    two = {"a": np.float32([[5, 6], [7, 8]]), "b": np.float32([[9, 0], [1, 2]])}
    answers = engine.run(Batch((one, two), 3))
    assert [{name: array.tolist() for name, array in answer.items()} for answer in answers] == [  # type: ignore[union-attr]
        {"first": [[1, 2]], "second": [[3, 4]]},
        {"first": [[5, 6], [7, 8]], "second": [[9, 0], [1, 2]]},
    ]
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.run(Batch((one,), 1))


@pytest.mark.parametrize(
    "outputs",
    [(tensor("y", datatype="FP16"),), (tensor("y", shape=(-1, 3)),), (tensor("y"), tensor("z"))],
    ids=["datatype", "shape", "more outputs than inputs"],
)
def test_a_model_that_is_no_echo_is_refused(outputs: tuple[TensorSpec, ...]) -> None:
    with pytest.raises(EngineError, match="an echo"):
        engines.open_engine("echo", ask((tensor("x"),), outputs))


async def test_a_node_serves_the_bundle_that_the_command_writes(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    command = (sys.executable, "-m", "common.cli", "model", "echo", "--out", folder, "--name", "back", "--row", "2,3")
    subprocess.run(command, check=True, capture_output=True)
    config = NodeConfig(
        models=(StaticModel(bundle=str(folder)),),
        engine=EngineOptions(variants=("full",), engines=("echo",)),
        cache=CacheOptions(enabled=False),
    )
    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    async with Node(config) as node:
        answer = await node.infer("back", {"x": x})
    assert answer.outputs["y"].tolist() == x.tolist()


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "FP16", "FP64"])
def test_a_bundle_of_any_numbers_passes_its_golden_gate(datatype: str, tmp_path: Path) -> None:
    from hardware.gate import judge

    bundle = Bundle.open(write_echo(tmp_path, datatype=datatype, row=(3,)))
    golden = bundle.golden()
    assert judge(bundle.spec, "full", golden, {"y": golden["input.x"]}).passed
    assert not judge(bundle.spec, "full", golden, {"y": np.zeros_like(golden["input.x"])}).passed


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"datatype": "F32"}, "FP32"),
        ({"datatype": "BYTES"}, "BOOL, .*FP64$"),
        ({"datatype": "BF16"}, "BOOL, .*FP64$"),
        ({"row": (0,)}, "neither -1 nor positive"),
        ({"max_batch": 0}, "max_batch"),
    ],
    ids=str,
)
def test_a_bundle_that_cannot_be_is_refused(wrong: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=says):
        write_echo(tmp_path, **wrong)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
