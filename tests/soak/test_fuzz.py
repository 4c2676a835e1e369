"""A sample of the fuzz run; `python -m tests.soak.fuzz` is all of it."""

from __future__ import annotations

from pathlib import Path

from tests.soak.fuzz import fuzz, live_node
from tests.soak.mutate import make

SEED = 20


def test_the_same_number_is_the_same_input() -> None:
    assert [make(SEED, index) for index in range(200)] == [make(SEED, index) for index in range(200)]
    assert make(SEED, 3) != make(SEED + 1, 3)


async def test_a_live_node_answers_whatever_comes_and_stays_what_it_is(tmp_path: Path) -> None:
    with live_node(tmp_path) as node:
        tally = await fuzz(node, inputs=1500, seed=SEED)
    assert tally.faults == []
    kinds = {name for name, count in tally.counts.items() if count}
    assert {"http 200", "http 400", "http 404", "http 405", "http 417", "http closed"} <= kinds
    assert {"grpc OK", "grpc INVALID_ARGUMENT", "grpc NOT_FOUND", "grpc UNIMPLEMENTED", "grpc closed"} <= kinds
