"""What every benchmark hands out, and how each runs alone: tables of figures, as markdown and as JSON."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os import cpu_count, getloadavg
from pathlib import Path

Cell = str | int | float | None
_BUNDLES = Path(__file__).resolve().parent.parent / "build/bundles"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured. `bundles`: where models are built and kept, as `outrider up --bundles` lays it out."""

    quick: bool = False
    bundles: Path = _BUNDLES

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(slots=True, kw_only=True)
class Table:
    title: str
    how: str  # what a figure is: medians of what, what alternates with what
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        if len(cells) != len(set(self.columns)):
            raise ValueError(f"{len(cells)} cells for the columns {', '.join(self.columns)}")
        self.rows.append(cells)

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", self.how, "", _line(self.columns), _line(["---"] * len(self.columns))]
        lines += [_line([_shown(cell) for cell in row]) for row in self.rows]
        lines += ["", *(f"{note}  " for note in self.notes)] if self.notes else []
        return "\n".join(lines).rstrip() + "\n"

    def facts(self) -> dict[str, object]:
        rows = [dict(zip(self.columns, map(_rounded, row), strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": self.notes}


Run = Callable[[Scale], Sequence[Table]]


def main(run: Run, about: str | None) -> None:
    """The command line of one benchmark."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arguments = parser.parse_args()
    publish([(Path(sys.argv[0]).stem, run)], arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a look, not a measurement: few calls, one round")
    parser.add_argument("--bundles", type=Path, default=_BUNDLES, help="where models are built (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there, one object a table")


def publish(benchmarks: Sequence[tuple[str, Run]], arguments: argparse.Namespace) -> None:
    """Runs them; prints each table when it is there, then one line of JSON."""
    scale = Scale(quick=arguments.quick, bundles=arguments.bundles)
    where = {
        "at": _now(),
        "cores": cpu_count(),
        "python": platform.python_version(),
        "quick": scale.quick,
    }
    facts: list[dict[str, object]] = []
    for name, run in benchmarks:
        load = getloadavg()[0]
        print(f"\n## {name}\n\n{_now()}, load average before it {load:.1f}\n", flush=True)
        for table in run(scale):
            print(table.markdown(), flush=True)
            facts.append({"benchmark": name, "load": round(load, 2)} | table.facts())
    line = json.dumps(where | {"tables": facts})
    print(line, flush=True)
    if arguments.json is not None:
        arguments.json.write_text(line + "\n", encoding="utf-8")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return str(cell)


def _rounded(cell: Cell) -> Cell:
    return float(f"{cell:.5g}") if isinstance(cell, float) else cell
