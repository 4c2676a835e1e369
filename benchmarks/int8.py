"""Speed and loss of a bundle's `cpu-int8` against FP32, measured anew from its files: `int8.py BUNDLE [--data DIR]`.

Batch 1, one thread, both sessions with all of ONNX Runtime's optimizations; calls alternate between the two models. The
loss is taken on the held-out rows of DIR (what `outrider demo prepare` wrote). Nothing is read from the build's report.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

from common.bundle import Bundle
from common.images import normalize
from common.tensors import Array
from hardware.build.data import load_rows
from hardware.build.session import Session
from hardware.build.spec import load_spec
from hardware.build.speed import compare
from hardware.gate import Reference, measure

FULL, INT8 = "full/model.onnx", "cpu-int8/model.onnx"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, help="folder with model.toml and its held-out rows")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--calls", type=int, default=100, help="of each model, in each run")
    arguments = parser.parse_args()
    bundle = Bundle.open(arguments.bundle)
    speeds(bundle, arguments.runs, arguments.calls)
    if arguments.data is not None:
        losses(bundle, arguments.data)


def speeds(bundle: Bundle, runs: int, calls: int) -> None:
    feeds = golden_row(bundle)
    ratios = []
    for run in range(runs):
        speed = compare(bundle.file(FULL), bundle.file(INT8), feeds, calls=calls)
        ratios.append(speed.ratio)
        print(f"run {run + 1}: FP32 {speed.reference_ms:.3f} ms, INT8 {speed.candidate_ms:.3f} ms, {speed.ratio:.3f}x")
    print(f"speed: median {statistics.median(ratios):.3f}x of {runs} runs of {calls} calls, one row, one thread")


def golden_row(bundle: Bundle) -> dict[str, Array]:
    golden, model = bundle.golden(), bundle.spec.model
    feeds = {tensor.name: golden[f"input.{tensor.name}"][:1] for tensor in model.inputs}
    if model.image is not None:
        first = model.inputs[0].name
        feeds[first] = normalize(feeds[first], model.image)
    return feeds


def losses(bundle: Bundle, data: Path) -> None:
    spec = load_spec(data / "model.toml")
    _, heldout = load_rows(spec, data)
    output = spec.outputs[0].name
    fp32, int8 = (Session(bundle.file(name)).run_rows(heldout)[output] for name in (FULL, INT8))
    reference = Reference(
        metric=bundle.spec.golden.metric,
        outputs=fp32,
        labels=heldout.labels,
        groups=heldout.groups,
        posterior=spec.posterior,
    )
    loss = measure(reference, int8)
    print(
        f"loss: {loss.metric} {loss.value:.4f}, 90 % interval {loss.low:.4f}..{loss.high:.4f} "
        f"({loss.rows} rows, {loss.groups} groups)"
    )
    if heldout.labels is not None:
        right = (int8.argmax(axis=1) == heldout.labels, fp32.argmax(axis=1) == heldout.labels)
        print(f"true accuracy: INT8 {np.mean(right[0]):.4f}, FP32 {np.mean(right[1]):.4f}")


if __name__ == "__main__":
    main()
