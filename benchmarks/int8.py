"""Speed and loss of a bundle's `cpu-int8` against FP32, measured anew from its files: `int8.py BUNDLE [--data DIR]`.

Batch 1, one thread, both sessions with all of ONNX Runtime's optimizations; calls alternate between the two models. The
loss is taken on the held-out rows of DIR (what `outrider demo prepare` wrote). Nothing is read from the build's report.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

from benchmarks.models import digits, photos
from benchmarks.report import Scale, Table
from common.bundle import Bundle
from common.images import normalize
from common.tensors import Array
from hardware.build.data import load_rows
from hardware.build.session import Session
from hardware.build.spec import load_spec
from hardware.build.speed import compare
from hardware.gate import Loss, Reference, measure

FULL, INT8 = "full/model.onnx", "cpu-int8/model.onnx"


def run(scale: Scale) -> list[Table]:
    """The demo models, without an argument: the form that `python -m benchmarks` calls."""
    runs, calls = scale.pick(5, 1), scale.pick(100, 5)
    table = Table(
        title="INT8 against FP32",
        how=f"Batch 1, one thread, median of {runs} runs of {calls} interleaved calls; the loss on held-out rows.",
        columns=(
            "model",
            "FP32 ms",
            "cpu-int8 ms",
            "speed",
            "metric",
            "loss",
            "90 % interval",
            "rows",
            "groups",
            "true accuracy",
        ),
    )
    names = ("digits v1", "digits v3") if scale.quick else ("EfficientNet-Lite0", "digits v1", "digits v3")
    built = [*([] if scale.quick else [photos(scale.bundles)]), *digits(scale.bundles, "v1", "v3")]
    for name, model in zip(names, built, strict=True):
        bundle = Bundle.open(model.bundle)
        feeds = golden_row(bundle)
        speeds = [compare(bundle.file(FULL), bundle.file(INT8), feeds, calls=calls) for _ in range(runs)]
        loss, truth = loss_of(bundle, model.source)
        table.add(
            name,
            statistics.median(speed.reference_ms for speed in speeds),
            statistics.median(speed.candidate_ms for speed in speeds),
            f"{statistics.median(speed.ratio for speed in speeds):.2f} x",
            loss.metric,
            loss.value,
            f"{loss.low:.4f}..{loss.high:.4f}",
            *(loss.rows, loss.groups),
            f"{truth[0]:.4f}, FP32 {truth[1]:.4f}" if truth else None,
        )
    return [table]


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
    loss, truth = loss_of(bundle, data)
    print(
        f"loss: {loss.metric} {loss.value:.4f}, 90 % interval {loss.low:.4f}..{loss.high:.4f} "
        f"({loss.rows} rows, {loss.groups} groups)"
    )
    if truth is not None:
        print(f"true accuracy: INT8 {truth[0]:.4f}, FP32 {truth[1]:.4f}")


def loss_of(bundle: Bundle, data: Path) -> tuple[Loss, tuple[float, float] | None]:
    """On the held-out rows of `data`; with true labels also the accuracy of INT8 and of FP32."""
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
    truth = None
    if heldout.labels is not None:
        truth = (
            float(np.mean(int8.argmax(axis=1) == heldout.labels)),
            float(np.mean(fp32.argmax(axis=1) == heldout.labels)),
        )
    return measure(reference, int8), truth


if __name__ == "__main__":
    main()
