"""What a part of the soak found: one line for people, one object for machines, and what failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Result:
    part: str
    says: str
    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: bool = False

    @property
    def passed(self) -> bool:
        return not self.problems

    def line(self) -> str:
        word = "skip" if self.skipped else "ok  " if self.passed else "FAIL"
        return "\n".join([f"{word} {self.part}: {self.says}", *(f"       {problem}" for problem in self.problems)])

    def as_json(self) -> dict[str, Any]:
        word = "skipped" if self.skipped else "passed" if self.passed else "failed"
        return {"part": self.part, "result": word, **self.figures, "problems": self.problems}
