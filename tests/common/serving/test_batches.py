from __future__ import annotations

import random

import numpy as np
import pytest

from common.errors import EngineError
from common.serving.batches import run_batch
from common.serving.engine import Batch, Outputs
from tests.fakes import FakeEngine


def items(*values: float) -> list[tuple[dict[str, np.ndarray], int]]:
    return [
        ({"x": np.full((1 + index % 3, 2), value, np.float32)}, 1 + index % 3) for index, value in enumerate(values)
    ]


def upset_by(*bad: float) -> FakeEngine:
    def fail(batch: Batch) -> Exception | None:
        return ValueError("odd") if any(float(item["x"][0, 0]) in bad for item in batch.items) else None

    return FakeEngine(fail=fail)


def answers(engine: FakeEngine, values: list[float]) -> list[float | None]:
    """What each item is told: the engine's answer, or None for an error."""
    outcomes, _ = run_batch("m", engine, items(*values))
    assert len(outcomes) == len(values)
    return [None if isinstance(one, Exception) else float(one["y"][0, 0]) for one in outcomes]


@pytest.mark.parametrize("seed", range(8))
def test_one_item_that_upsets_the_engine_costs_its_neighbours_nothing(seed: int) -> None:
    count = random.Random(seed).randint(2, 64)
    bad = random.Random(seed).randrange(count)
    engine = upset_by(bad)
    expected = [None if index == bad else 2.0 * index for index in range(count)]
    assert answers(engine, [float(index) for index in range(count)]) == expected
    assert len(engine.batches) <= 1 + 2 * np.ceil(np.log2(count))


def test_an_engine_that_fails_whatever_it_is_given_is_not_tried_for_each_item() -> None:
    engine = FakeEngine(fail=lambda _: MemoryError("no room"))
    outcomes, is_usual = run_batch("m", engine, items(*range(64)))
    assert all(isinstance(one, EngineError) and "MemoryError: no room" in str(one) for one in outcomes)
    assert len(engine.batches) <= 13
    assert not is_usual


def test_a_usual_run_says_so_and_calls_the_engine_once() -> None:
    engine = FakeEngine()
    outcomes, is_usual = run_batch("m", engine, items(1, 2, 3))
    assert [one["y"].shape for one in outcomes if not isinstance(one, Exception)] == [(1, 2), (2, 2), (3, 2)]
    assert (engine.batches, is_usual) == ([6], True)


@pytest.mark.parametrize(
    ("results", "what"),
    [
        ([{"y": np.ones((1, 2))}], "1 answers for 2 requests"),
        ([{"y": np.ones((1, 2))}, {"y": np.ones((1, 2))}], "for 2 rows"),
        (None, "TypeError"),
        ([1, 2], "AttributeError"),
    ],
)
def test_answers_that_cannot_be_told_apart_are_nobodys(results: list[Outputs | Exception], what: str) -> None:
    class Wrong(FakeEngine):
        def run(self, batch: Batch) -> list[Outputs | Exception]:
            self.batches.append(batch.rows)
            return results

    engine = Wrong()
    outcomes, _ = run_batch("m", engine, items(1, 2))
    assert isinstance(outcomes[1], EngineError)
    assert what in str(outcomes[1])
    assert len(engine.batches) == 1  # asking again would bring no other answer
