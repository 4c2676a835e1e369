"""How an engine does while it serves: what the parameter path watches after a swap, and rolls back for."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import EngineError


@dataclass(slots=True)
class Tally:
    """Outcomes of one engine's requests since it was loaded, counted where its answers go out."""

    answers: int = 0
    errors: int = 0  # the engine's own failures; late or invalid requests are none

    def count(self, result: object) -> None:
        if isinstance(result, EngineError):
            self.errors += 1
        elif not isinstance(result, Exception):
            self.answers += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """`latency_s`: seconds of a batch of one row as predicted from what was measured, None where nothing was."""

    version: str
    answers: int
    errors: int
    latency_s: float | None

    @property
    def calls(self) -> int:
        return self.answers + self.errors
