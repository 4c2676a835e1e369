"""The synthetic engine: it takes as long as it is told, and fails as and when it is told."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.bundle import ModelConfig
from common.config import parse
from common.errors import ConfigError, EngineError
from common.serving.engine import Batch, Engine
from common.tensors import TensorSpec
from edge import Node, NodeConfig
from hardware import engines
from hardware.build.echo import write_echo
from hardware.engines.base import EngineRequest
from hardware.engines.drill import Drill
from hardware.install import EngineOptions

ROW = {"x": np.float32([[1, 2]])}
ROWS = {"x": np.float32([[1, 2], [3, 4], [5, 6]])}


def opened(drill: Drill, datatype: str = "FP32") -> Engine:
    x, y = (TensorSpec(name=name, datatype=datatype, shape=(-1, 2)) for name in "xy")
    config = ModelConfig(name="device", task="tensor", inputs=(x,), outputs=(y,))
    return engines.open_engine("synthetic", EngineRequest(config=config, variant="full", files=(), drill=drill))


def timed(engine: Engine, item: dict[str, Any]) -> float:
    """The quickest of three: what else the machine is doing only ever adds."""
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        engine.run(Batch((item,), len(item["x"])))
        seconds.append(time.monotonic() - started)
    return min(seconds)


def test_a_batch_takes_its_time_by_rows_and_the_warm_up_measures_it() -> None:
    engine = opened(Drill(a_ms=10, b_ms=5))
    assert 0.015 <= timed(engine, ROW) < 0.050  # 10 + 5
    assert 0.025 <= timed(engine, ROWS) < 0.075  # 10 + 3 x 5
    assert engine.warm().seconds(5, 0.0) == pytest.approx(0.035, rel=0.3)  # 10 + 5 x 5


def test_without_a_drill_it_is_an_echo() -> None:
    [answer] = opened(Drill()).run(Batch((ROWS,), 3))
    assert not isinstance(answer, Exception)
    assert answer["y"].tolist() == [[1, 2], [3, 4], [5, 6]]


def test_each_third_batch_fails_once_the_healthy_ones_are_over() -> None:
    engine = opened(Drill(fault="raise", every=3, healthy_batches=2))
    failed = []
    engine.warm()  # neither fails nor counts
    for number in range(1, 12):
        try:
            engine.run(Batch((ROW,), 1))
        except EngineError:
            failed.append(number)
    assert failed == [5, 8, 11]


def test_a_probability_strikes_about_so_often_and_the_same_for_the_same_seed() -> None:
    def struck(seed: int) -> list[bool]:
        return list(itertools.islice(Drill(fault="raise", probability=0.25, seed=seed).strikes(), 2000))

    assert 400 < sum(struck(7)) < 600  # five sigmas around 500
    assert struck(7) == struck(7)
    assert struck(7) != struck(8)


def test_a_hang_and_a_slow_batch_take_longer() -> None:
    assert timed(opened(Drill(fault="hang", every=1, hang_s=0.1)), ROW) >= 0.1
    assert timed(opened(Drill(a_ms=10, fault="slow", every=1, slow_factor=5)), ROW) >= 0.05


def test_wrong_rows_lack_the_last_one_and_nan_is_in_every_place() -> None:
    [short] = opened(Drill(fault="wrong_rows", every=1)).run(Batch((ROWS,), 3))
    [nan] = opened(Drill(fault="nan", every=1)).run(Batch((ROWS,), 3))
    assert not isinstance(short, Exception)
    assert not isinstance(nan, Exception)
    assert short["y"].tolist() == [[1, 2], [3, 4]]
    assert nan["y"].shape == (3, 2)
    assert np.isnan(nan["y"]).all()
    assert not np.isnan(ROWS["x"]).any()  # the caller's own array is left alone


def test_integers_cannot_be_made_nan() -> None:
    with pytest.raises(EngineError, match="floating"):
        opened(Drill(fault="nan", every=1), datatype="INT32")


@pytest.mark.parametrize(
    ("table", "path", "says"),
    [
        ({"a_ms": -1}, "a_ms", "0..3.6e.06 milliseconds"),
        ({"b_ms": float("nan")}, "b_ms", "milliseconds"),
        ({"fault": "explode", "every": 1}, "fault", "explode"),
        ({"fault": "raise"}, "raise", "either every .* or probability"),
        ({"fault": "raise", "every": 2, "probability": 0.5}, "raise", "either every .* or probability"),
        ({"every": 2}, "every", "fault is 'none'"),
        ({"fault": "raise", "probability": 1.5}, "probability", "0..1"),
        ({"fault": "raise", "every": -1}, "every", ">= 0"),
        ({"fault": "hang", "every": 1}, "hang_s", "fault 'hang'"),
        ({"fault": "slow", "every": 1}, "slow_factor", "fault 'slow'"),
        ({"fault": "raise", "every": 1, "hang_s": 2}, "hang_s", "fault 'hang'"),
        ({"a_mss": 5}, "engine.synthetic.device.a_mss", "a_ms"),
    ],
    ids=str,
)
def test_a_wrong_drill_is_refused_with_what_would_be_right(table: dict[str, Any], path: str, says: str) -> None:
    data = {"cache": {"enabled": False}, "engine": {"engines": ["synthetic"], "synthetic": {"device": table}}}
    with pytest.raises(ConfigError, match=says) as refused:
        parse(data, NodeConfig, "node.toml")
    assert path in str(refused.value)
    assert "engine.synthetic" in str(refused.value)


def test_a_drill_for_an_engine_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(ValueError, match="engines lacks 'synthetic'"):
        EngineOptions(synthetic={"device": Drill()})


async def test_a_node_plays_the_drill_of_its_config(tmp_path: Path) -> None:
    config = parse(
        {
            "cache": {"enabled": False},
            "models": [{"bundle": str(write_echo(tmp_path, name="device", row=(2,)))}],
            "engine": {
                "variants": ["full"],
                "engines": ["synthetic"],
                "synthetic": {"device": {"a_ms": 1, "fault": "wrong_rows", "every": 2, "healthy_batches": 1}},
            },
        },
        NodeConfig,
        "node.toml",
    )
    async with Node(config) as node:
        answer = await node.infer("device", ROW)
        assert answer.outputs["y"].tolist() == [[1, 2]]
        with pytest.raises(EngineError, match=r"shape \[0, 2\] for 1 rows"):
            await node.infer("device", ROW)
