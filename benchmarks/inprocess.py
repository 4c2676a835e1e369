"""What a call in process costs over the engine alone: `inprocess.py [BUNDLE]` (default: a linear model made here).

The same row through `Node.infer` and through ONNX Runtime's `session.run`, alternating, one caller, one thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
import uvloop

from common.bundle import Bundle
from edge import CacheOptions, Node, NodeConfig, StaticModel
from hardware.install import EngineOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000, help="of each, in each run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = arguments.bundle or linear(Path(folder))
        uvloop.run(measure(bundle, arguments.runs, arguments.calls))


async def measure(folder: Path, runs: int, calls: int) -> None:
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
        engine=EngineOptions(threads=1),
    )
    async with Node(config) as node:
        added = []
        for run in range(runs):
            direct, through = [], []
            for _ in range(calls):
                start = time.perf_counter()
                session.run(None, feeds)
                middle = time.perf_counter()
                await node.infer(spec.name, feeds)
                direct.append(middle - start)
                through.append(time.perf_counter() - middle)
            alone, whole = statistics.median(direct) * 1e6, statistics.median(through) * 1e6
            added.append(whole - alone)
            print(f"run {run + 1}: session.run {alone:.1f} us, node.infer {whole:.1f} us, {whole - alone:+.1f} us")
    print(f"added by the node: median {statistics.median(added):.1f} us of {runs} runs of {calls} calls")


def linear(folder: Path) -> Path:
    from tests.bundles import write_bundle

    return write_bundle(folder)


if __name__ == "__main__":
    main()
