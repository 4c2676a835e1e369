"""Which layers stay in float, on made-up losses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hardware.build.layers import Layer, mac_share
from hardware.build.search import Outcome, search
from hardware.build.sensitivity import by_error_per_mac


def layer(name: str, macs: int) -> Layer:
    return Layer(
        name=name, op="Conv", input="i", output="o", weight="w", macs=macs, rank=4, activation=None, result="o"
    )


TEN = [layer(f"l{i}", 10) for i in range(10)]
ORDER = [one.name for one in TEN]


def needs(*names: str) -> Callable[[tuple[str, ...]], float]:
    """A loss of 0.1 for each of `names` that is still quantized."""
    return lambda kept: 0.1 * len(set(names) - set(kept))


def found(loss: Callable[[tuple[str, ...]], float], *, start: tuple[str, ...] = (), max_share: float = 1.0) -> Outcome:
    return search(TEN, lambda: ORDER, start, loss, max_drop=0.05, max_share=max_share)


def test_nothing_is_left_in_float_when_nothing_is_lost() -> None:
    outcome = search(TEN, lambda: pytest.fail("the order is not needed"), (), lambda _: 0.0, max_drop=0.05, max_share=1)
    assert outcome.is_held
    assert outcome.chosen.float_layers == ()
    assert len(outcome.tries) == 1


@pytest.mark.parametrize("last", range(10))
def test_the_shortest_prefix_that_holds_is_found_in_few_tries(last: int) -> None:
    outcome = found(needs(f"l{last}"))
    assert outcome.is_held
    assert outcome.chosen.float_layers == tuple(ORDER[: last + 1])
    assert outcome.chosen.float_share == pytest.approx((last + 1) / 10)
    assert len(outcome.tries) <= 8


def test_the_search_starts_from_the_predecessors_set() -> None:
    outcome = found(needs("l7"), start=("l7",))
    assert outcome.chosen.float_layers == ("l7",)
    grown = found(needs("l7", "l0"), start=("l7",))
    assert grown.chosen.float_layers == ("l7", "l0")


def test_the_share_of_macs_is_never_exceeded() -> None:
    outcome = found(needs("l5"), max_share=0.3)
    assert not outcome.is_held
    assert max(one.float_share for one in outcome.tries) <= 0.3
    assert outcome.worst[:2] == ("l0", "l1")


def test_a_layer_too_costly_is_passed_over_for_a_cheaper_one() -> None:
    layers = [layer("huge", 90), layer("small", 10)]
    outcome = search(layers, lambda: ["huge", "small"], (), needs("small"), max_drop=0.05, max_share=0.25)
    assert outcome.is_held
    assert outcome.chosen.float_layers == ("small",)


def test_of_sets_that_all_miss_the_best_is_reported() -> None:
    outcome = found(lambda kept: 0.5 - 0.01 * len(kept), max_share=0.4)
    assert outcome.chosen.loss == pytest.approx(0.46)


def test_layers_are_ranked_by_error_per_mac() -> None:
    layers = [layer("cheap", 10), layer("dear", 1000), layer("harmless", 10)]
    assert by_error_per_mac(layers, {"cheap": 0.1, "dear": 0.5, "harmless": 0.0}) == ("cheap", "dear", "harmless")


def test_mac_share_counts_each_layer_once() -> None:
    assert mac_share([layer("a", 30), layer("b", 70)], ["a", "a"]) == pytest.approx(0.3)
