"""`build`: a model's spec to a bundle folder, or a reason why not. The order of the steps, and nothing else."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from common.bundle import DESCRIPTION, BundleSpec, Variant, write_spec
from common.errors import BuildError
from common.tensors import Array, datatype_of
from hardware.build import golden
from hardware.build.calibrate import calibrate
from hardware.build.data import Rows, load_rows
from hardware.build.export import check_parity, export_onnx, load_module
from hardware.build.graph import Graph, simplify
from hardware.build.layers import find_layers, mac_share
from hardware.build.mixed import Built, Measured, Say, VariantBuild
from hardware.build.predecessor import Predecessor
from hardware.build.report import BuildReport, VariantReport, write_report
from hardware.build.session import Session
from hardware.build.spec import ModelSpec
from hardware.build.variants import FULL, RECIPES
from hardware.gate import Metric, Reference, measure

_LABELS = "labels.txt"
_ONNX, _CHECKPOINT = f"{FULL}/model.onnx", f"{FULL}/model.safetensors"


def build(
    spec: ModelSpec,
    base: Path,
    out: Path,
    *,
    successor_of: Path | None = None,
    skip_gate: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> BuildReport:
    """Builds the bundle folder `out`; paths in `spec` are relative to `base`.

    The folder appears whole or not at all, and takes the place of an earlier bundle. The build
    starts from the scales of the bundle `successor_of` and from what it left in float. With `skip_gate` a model that
    misses the gate is built all the same, but its golden set asks of nodes what the gate would have: they refuse it.
    Raises `GateRefused`, `CalibrationMissing` or another `BuildError`.
    """
    began = time.monotonic()

    def say(line: str) -> None:
        progress(f"{time.monotonic() - began:6.1f} s  {spec.name}: {line}")

    _check_target(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        folder = Path(scratch) / "bundle"
        folder.mkdir()
        predecessor = None if successor_of is None else Predecessor.open(successor_of, spec.name)
        calibration, heldout = load_rows(spec, base)
        say(f"{len(calibration)} calibration rows, {len(heldout)} held-out rows, none shared")
        parity = _write_full(spec, base, folder, heldout, say)
        outputs = Session(folder / _ONNX).run_rows(heldout)
        _check_outputs(spec, outputs)
        measured = _measure(spec, folder, calibration, heldout, outputs)
        say(f"{len(measured.layers)} layers and {len(measured.statistics.ranges)} ranges calibrated")
        variants = []
        for recipe in RECIPES:
            one = VariantBuild(measured, recipe, predecessor, say)
            variants.append(one.write(folder, skip_gate=skip_gate))
        variants.append(_full(measured.reference, folder))
        _describe(spec, base, folder, measured, outputs, variants)
        report = BuildReport(
            model=spec.name,
            bundle=str(out),
            max_drop=spec.gate.max_drop,
            max_float_share=spec.gate.max_float_share,
            calibration_rows=len(calibration),
            heldout_rows=len(heldout),
            parity=parity,
            build_s=round(time.monotonic() - began, 2),
            is_gate_skipped=skip_gate,
            variants=tuple(one.report for one in variants),
        )
        write_report(report, folder)
        _put_in_place(folder, out, Path(scratch) / "replaced")
    say(f"bundle {out} is complete")
    return report


def _write_full(spec: ModelSpec, base: Path, folder: Path, rows: Rows, say: Say) -> float | None:
    """FP32 as ONNX, and the checkpoint as it came. Returns how far the two are apart; None for an ONNX source."""
    (folder / FULL).mkdir()
    if spec.source.onnx is not None:
        _check_names(spec, Graph.load(base / spec.source.onnx))
        shutil.copyfile(base / spec.source.onnx, folder / _ONNX)
        return None
    module = load_module(spec.source, base)
    shutil.copyfile(base / str(spec.source.checkpoint), folder / _CHECKPOINT)
    export_onnx(module, spec, rows, folder / _ONNX)
    parity = check_parity(module, folder / _ONNX, spec, rows)
    say(f"exported to ONNX, {parity:.1e} from torch")
    return parity


def _check_names(spec: ModelSpec, graph: Graph) -> None:
    for kind, have, declared in (
        ("inputs", graph.input_names(), [tensor.name for tensor in spec.inputs]),
        ("outputs", graph.output_names(), [tensor.name for tensor in spec.outputs]),
    ):
        if sorted(have) != sorted(declared):
            raise BuildError(f"model {spec.name!r}: {kind} of the ONNX file are {list(have)}, the spec has {declared}")


def _check_outputs(spec: ModelSpec, outputs: dict[str, Array]) -> None:
    """FP32's answers to the held-out rows are what the spec declares, and numbers."""
    for tensor in spec.outputs:
        array = outputs[tensor.name]
        if datatype_of(array) != tensor.datatype or not tensor.matches(array.shape):
            raise BuildError(
                f"model {spec.name!r}: output {tensor.name!r} is {datatype_of(array)} {list(array.shape)} on the "
                f"held-out rows; the spec declares {tensor.datatype} {list(tensor.shape)}"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise BuildError(f"model {spec.name!r}: FP32's output {tensor.name!r} is not finite on the held-out rows")


def _measure(spec: ModelSpec, folder: Path, calibration: Rows, heldout: Rows, outputs: dict[str, Array]) -> Measured:
    graph = simplify(folder / _ONNX)
    layers = find_layers(graph, heldout)
    unknown = sorted(set(spec.gate.float_layers) - {layer.name for layer in layers})
    if unknown:
        raise BuildError(f"gate.float_layers: {unknown} are no layers of {spec.name!r}: {[x.name for x in layers]}")
    share = mac_share(layers, spec.gate.float_layers)
    if share > spec.gate.max_float_share:
        raise BuildError(
            f"gate.float_layers do {share:.1%} of the MACs, max_float_share is {spec.gate.max_float_share}"
        )
    first = spec.outputs[0].name
    return Measured(
        model=spec.name,
        gate=spec.gate,
        output=first,
        fp32=folder / _ONNX,
        graph=graph,
        layers=layers,
        statistics=calibrate(graph, layers, calibration),
        calibration=calibration,
        heldout=heldout,
        reference=Reference(
            metric=_metric(spec, heldout),
            outputs=outputs[first],
            labels=heldout.labels,
            groups=heldout.groups,
            posterior=spec.posterior,
        ),
    )


def _metric(spec: ModelSpec, heldout: Rows) -> Metric:
    if spec.gate.metric == "accuracy" and heldout.labels is None:
        raise BuildError(f"model {spec.name!r}: the accuracy metric needs `labels` in {spec.holdout.file}")
    if spec.gate.metric is not None:
        return spec.gate.metric
    if spec.task != "classification":
        return "cosine"
    return "expected_accuracy" if heldout.labels is None else "accuracy"


def _full(reference: Reference, folder: Path) -> Built:
    """FP32 is what the others are measured against: it loses nothing."""
    report = VariantReport(
        name=FULL,
        loss=measure(reference, reference.outputs),
        is_within_gate=True,
        size_bytes=(folder / _ONNX).stat().st_size,
        float_share=1.0,
    )
    return Built(answers=reference.outputs, report=report)


def _describe(
    spec: ModelSpec,
    base: Path,
    folder: Path,
    measured: Measured,
    outputs: dict[str, Array],
    variants: Sequence[Built],
) -> None:
    """Golden set, labels and ``bundle.json``."""
    index = golden.pick(measured.heldout)
    golden.write_golden(folder, measured.heldout, outputs, index)
    if spec.labels is not None:
        _copy_labels(spec, base / spec.labels, folder / _LABELS)
    full: dict[str, tuple[str, ...]] = {"onnxruntime": (_ONNX,)}
    if (folder / _CHECKPOINT).exists():
        full = {"torch": (_CHECKPOINT,), **full}
    write_spec(
        BundleSpec(
            model=spec.config(),
            variants=(
                *(Variant(name=recipe.name, files={recipe.engine: (recipe.file,)}) for recipe in RECIPES),
                Variant(name=FULL, files=full),
            ),
            golden=golden.golden_spec(measured.reference, variants, index, spec.gate.max_drop),
        ),
        folder,
    )


def _copy_labels(spec: ModelSpec, source: Path, target: Path) -> None:
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise BuildError(f"labels {source} cannot be read: {exc}") from exc
    classes = spec.outputs[0].shape[-1]
    if classes != -1 and len(text.splitlines()) != classes:
        raise BuildError(
            f"labels {source} has {len(text.splitlines())} lines, output {spec.outputs[0].name!r} {classes}"
        )
    target.write_text(text, encoding="utf-8")


def _check_target(out: Path) -> None:
    if out.exists() and not (out / DESCRIPTION).exists() and not (out.is_dir() and not any(out.iterdir())):
        raise BuildError(f"{out} exists and is no bundle; accepted: a new path, an empty folder or an earlier bundle")


def _put_in_place(folder: Path, out: Path, aside: Path) -> None:
    """Swaps the finished folder in; an earlier one goes with the scratch folder."""
    if out.exists():
        out.rename(aside)
    folder.rename(out)
