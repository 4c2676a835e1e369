"""Which layers stay in float: as few as hold the gate, worst error per MAC first. Rules only, no models.

The order is fixed beforehand, so a choice is a prefix of it. Its length doubles until the loss is small enough, then is
halved back: about 2 log2(layers) tries instead of one per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hardware.build.layers import Layer, mac_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    float_layers: tuple[str, ...]
    loss: float
    float_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    chosen: Try  # the smallest set that held, or the best one seen
    is_held: bool
    tries: tuple[Try, ...]
    worst: tuple[str, ...]  # layers by error per MAC, worst first; empty where the start held


def search(
    layers: Sequence[Layer],
    order: Callable[[], Sequence[str]],
    start: Sequence[str],
    loss_of: Callable[[tuple[str, ...]], float],
    *,
    max_drop: float,
    max_share: float,
) -> Outcome:
    """Grows the set from `start` (the predecessor's) along `order()` until `loss_of` it is at most `max_drop`.

    The order is costly to find, so it is asked for only once `start` has missed. Layers whose MACs would break
    `max_share` are passed over for cheaper ones further down.
    """
    tries: dict[int, Try] = {}
    steps: Sequence[str] = ()
    worst: tuple[str, ...] = ()

    def attempt(length: int) -> bool:
        if length not in tries:
            chosen = (*start, *steps[:length])
            tries[length] = Try(float_layers=chosen, loss=loss_of(chosen), float_share=mac_share(layers, chosen))
        return tries[length].loss <= max_drop

    length, failed = 0, -1
    if not attempt(0):
        worst = tuple(order())
        steps = _affordable(layers, worst, start, max_share)
    while not (is_held := attempt(length)) and length < len(steps):
        failed = length
        length = min(len(steps), max(1, 2 * length))
    while is_held and length - failed > 1:
        middle = (length + failed) // 2
        if attempt(middle):
            length = middle
        else:
            failed = middle
    best = tries[length] if is_held else min(tries.values(), key=lambda one: (one.loss, one.float_share))
    return Outcome(chosen=best, is_held=is_held, tries=tuple(tries.values()), worst=worst)


def _affordable(
    layers: Sequence[Layer], order: Sequence[str], start: Sequence[str], max_share: float
) -> tuple[str, ...]:
    taken = list(start)
    for name in order:
        if name not in taken and mac_share(layers, [*taken, name]) <= max_share:
            taken.append(name)
    return tuple(taken[len(start) :])
