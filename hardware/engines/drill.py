"""What a `synthetic` engine is told to be: how long a batch takes, and how and when it fails. Rules only, no clock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Fault = Literal["none", "raise", "hang", "wrong_rows", "nan", "slow"]
MAX_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """A batch takes `a_ms` + `b_ms` x rows. `fault` strikes each `every`-th batch, or each with `probability`.

    raise: the batch fails; hang: it takes `hang_s` more; slow: it takes `slow_factor` times as long; wrong_rows: its
    outputs lack their last row; nan: its floating outputs are NaN. The batches of the warm-up neither fail nor count.
    The golden set of an installation is a batch that counts: `healthy_batches = 1` keeps it whole.
    """

    a_ms: float = 0.0  # 0..3600000: of each batch
    b_ms: float = 0.0  # 0..3600000: more for each row
    fault: Fault = "none"  # what happens to a batch that is struck
    every: int = 0  # 0..: the fault strikes each batch of this number; 0: by probability
    probability: float = 0.0  # 0..1: that the fault strikes a batch; 0: by number
    seed: int = 0  # of the draws
    healthy_batches: int = 0  # 0..: the first ones, before the fault may strike
    hang_s: float = 0.0  # 0..3600: how long fault "hang" lasts
    slow_factor: float = 1.0  # 1..1000: of fault "slow"

    def __post_init__(self) -> None:
        for name, value, limit in (("a_ms", self.a_ms, MAX_S * 1e3), ("b_ms", self.b_ms, MAX_S * 1e3)):
            if not 0 <= value <= limit:
                raise ValueError(f"{name} must be 0..{limit:g} milliseconds, got {value}")
        if self.every < 0 or self.healthy_batches < 0:
            raise ValueError(f"every and healthy_batches must be >= 0, got {self.every} and {self.healthy_batches}")
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability must be 0..1, got {self.probability}")
        if self.fault == "none":
            if self.every or self.probability:
                raise ValueError("every and probability say when a fault strikes, but fault is 'none'")
        elif bool(self.every) == bool(self.probability):
            raise ValueError(f"fault {self.fault!r} needs either every (1: each batch) or probability")
        if (self.fault == "hang") != (self.hang_s != 0) or not 0 <= self.hang_s <= MAX_S:
            raise ValueError(f"hang_s is the length of fault 'hang', up to {MAX_S:g} seconds; got {self.hang_s}")
        if (self.fault == "slow") != (self.slow_factor != 1) or not 1 <= self.slow_factor <= 1000:
            raise ValueError(f"slow_factor belongs to fault 'slow', over 1 and up to 1000; got {self.slow_factor}")

    def seconds(self, rows: int) -> float:
        return (self.a_ms + self.b_ms * rows) / 1000

    def strikes(self) -> Iterator[bool]:
        """Per batch, in order and without end: does the fault strike it?"""
        draws = random.Random(self.seed)
        count = 0
        while True:
            count += 1
            after = count - self.healthy_batches
            if self.probability:
                yield draws.random() < self.probability and after > 0
            else:
                yield bool(self.every) and after > 0 and after % self.every == 0
