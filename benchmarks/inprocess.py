"""What a call in process costs over the engine alone: `inprocess.py [BUNDLE]` (default: a linear model made here).

The same row through `Node.infer` and through ONNX Runtime's `session.run`, alternating, one caller; once with the
engine on its own thread, as it is by default, and once inline, on the event loop.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime as ort
import uvloop

from benchmarks.report import Scale, Table
from common.bundle import Bundle
from edge import CacheOptions, Node, NodeConfig, StaticModel
from hardware.install import EngineOptions

MODES = {"thread": 0.0, "inline": 1000.0}  # engine.inline_below_us


@dataclass(slots=True)
class Figures:
    """Medians of each run, in microseconds."""

    direct_us: list[float] = field(default_factory=list)
    through_us: list[float] = field(default_factory=list)

    @property
    def added_us(self) -> float:
        pairs = zip(self.through_us, self.direct_us, strict=True)
        return statistics.median(through - direct for through, direct in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000, help="of each, in each run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(tabulate(arguments.bundle or linear(Path(folder)), arguments.runs, arguments.calls).markdown())


def run(scale: Scale) -> list[Table]:
    with tempfile.TemporaryDirectory() as folder:
        return [tabulate(linear(Path(folder)), scale.pick(5, 1), scale.pick(2000, 100))]


def tabulate(bundle: Path, runs: int, calls: int) -> Table:
    table = Table(
        title="A call in process over `session.run`",
        how=f"One row, one caller, us; medians of {runs} runs of {calls} calls of each, alternating.",
        columns=("engine", "session.run us", "node.infer us", "added us", "lowest and highest run"),
    )
    for mode, inline_below_us in MODES.items():
        figures = uvloop.run(measure(bundle, runs, calls, inline_below_us))
        direct, through = map(statistics.median, (figures.direct_us, figures.through_us))
        added = [b - a for a, b in zip(figures.direct_us, figures.through_us, strict=True)]
        table.add(mode, direct, through, figures.added_us, f"{min(added):.1f}..{max(added):.1f}")
    return table


async def measure(folder: Path, runs: int, calls: int, inline_below_us: float) -> Figures:
    bundle = Bundle.open(folder)
    spec = bundle.spec.model
    shape = [1 if size == -1 else size for size in spec.inputs[0].shape]
    feeds = {spec.inputs[0].name: np.zeros(shape, np.float32)}
    variant = bundle.variant("cpu-int8").files["onnxruntime"][0]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(bundle.file(variant), options, providers=["CPUExecutionProvider"])
    config = NodeConfig(
        models=(StaticModel(bundle=str(folder)),),
        cache=CacheOptions(enabled=False),
        engine=EngineOptions(threads=1, inline_below_us=inline_below_us),
    )
    figures = Figures()
    async with Node(config) as node:
        for _ in range(runs):
            direct, through = [], []
            for _ in range(calls):
                start = time.perf_counter()
                session.run(None, feeds)
                middle = time.perf_counter()
                await node.infer(spec.name, feeds)
                direct.append(middle - start)
                through.append(time.perf_counter() - middle)
            figures.direct_us.append(statistics.median(direct) * 1e6)
            figures.through_us.append(statistics.median(through) * 1e6)
    return figures


def linear(folder: Path) -> Path:
    from tests.bundles import write_bundle

    return write_bundle(folder)


if __name__ == "__main__":
    main()
