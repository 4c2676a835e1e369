"""One batch on an engine, and one outcome for each of its items, whatever the engine does.

An engine that raises may have been upset by one item: the batch is halved until the item that did it stands alone, so
that its neighbours get their answers. What an engine answers is checked: rows of one caller never reach another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.errors import EngineError, InvalidRequest
from common.serving.engine import Batch, Engine, Outputs
from common.tensors import Tensors

Items = Sequence[tuple[Tensors, int]]  # inputs and rows of each caller
_RUNS_PER_HALVING = 2


def run_batch(model: str, engine: Engine, items: Items) -> tuple[list[Outputs | Exception], bool]:
    """One outcome per item, in order; and whether it was a usual run, whose time says something about the engine."""
    outcome = _run(model, engine, items)
    if isinstance(outcome, list):
        return outcome, True
    if len(items) == 1:
        return [outcome], False
    left = [_RUNS_PER_HALVING * math.ceil(math.log2(len(items)))]  # what finding one culprit takes
    return _halved(model, engine, items, outcome, left), False


def _halved(
    model: str, engine: Engine, items: Items, problem: EngineError, left: list[int]
) -> list[Outputs | Exception]:
    """`left`: runs that may still be tried; what is not tried any more fails as the whole did."""
    if len(items) == 1 or left[0] <= 0:
        return [problem for _ in items]
    outcomes: list[Outputs | Exception] = []
    for half in (items[: len(items) // 2], items[len(items) // 2 :]):
        if left[0] <= 0:
            outcomes += [problem for _ in half]
            continue
        left[0] -= 1
        found = _run(model, engine, half)
        outcomes += found if isinstance(found, list) else _halved(model, engine, half, found, left)
    return outcomes


def _run(model: str, engine: Engine, items: Items) -> list[Outputs | Exception] | EngineError:
    """An error of its own where the engine raised; answers that cannot be told apart are each caller's error."""
    try:
        if len(items) == 1:
            results = engine.run(Batch((items[0][0],), items[0][1]))
        else:
            results = engine.run(Batch(tuple(inputs for inputs, _ in items), sum(rows for _, rows in items)))
    except BaseException as exc:  # whatever it is, each caller is told and the thread goes on
        return EngineError(model, f"{type(exc).__name__}: {exc}")
    try:
        if len(results) != len(items):
            raise ValueError(f"{len(results)} answers for {len(items)} requests")
        if len(items) == 1:
            return [_checked(model, items[0][1], results[0])]
        return [_checked(model, rows, result) for (_, rows), result in zip(items, results, strict=True)]
    except Exception as exc:  # no list of mappings of arrays
        problem = EngineError(model, f"{type(exc).__name__}: {exc}")
        return [problem for _ in items]


def _checked(model: str, rows: int, result: Outputs | Exception) -> Outputs | Exception:
    if isinstance(result, EngineError | InvalidRequest):  # the engine's own word, or that of what it was given
        return result
    if isinstance(result, Exception):
        return EngineError(model, f"{type(result).__name__}: {result}")
    for output, array in result.items():
        if array.shape[:1] != (rows,):
            return EngineError(model, f"output {output!r} has shape {list(array.shape)} for {rows} rows")
    return result
