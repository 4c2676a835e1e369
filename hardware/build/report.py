"""What a build measured: `report.json` beside the bundle's files, and the table that people read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.config import from_json, to_json
from common.errors import BuildError, ConfigError
from hardware.gate import Loss

FILE = "report.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """One layer as quantized on its own: `sqnr_db` is signal to quantization noise, the mean over its channels."""

    name: str
    op: str
    macs: int
    sqnr_db: float | None  # None: not quantized in this variant


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorScale:
    """What became of the predecessor's quantization scale of one tensor."""

    name: str
    kind: Literal["weight", "activation"]
    channels: int  # each has a scale of its own; 1: one for the whole tensor
    kept: int  # channels whose scale is the predecessor's, bit for bit
    drift: float | None = None  # new range / old range, in the channel where it is farthest from 1
    clipped_share: float | None = None  # of the weights: those that a kept scale clips; None for an activation
    excess_steps: float = 0.0  # how far, in integers, the farthest value lies beyond a kept range
    reason: str = ""  # why a channel has a new scale


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalesReport:
    """A successor's scales. Its delta to the predecessor is an estimate (`hardware/build/delta.py`), made both ways."""

    is_kept: bool  # False: recomputed for all tensors, for `reason`
    reason: str = ""
    tensors: tuple[TensorScale, ...] = ()
    changed_share: float | None = None  # of the 8 bit integers, with kept scales
    changed_share_recomputed: float | None = None
    delta_bytes: int | None = None  # with kept scales
    delta_bytes_recomputed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantReport:
    name: str
    loss: Loss
    is_within_gate: bool
    size_bytes: int
    float_layers: tuple[str, ...] = ()
    float_share: float = 0.0  # of the MACs
    tries: int = 0
    is_simulated: bool = False  # scored in float, not by the engine that will run it
    milliseconds: float | None = None  # batch 1, one thread; None where it cannot run here
    fp32_milliseconds: float | None = None
    layers: tuple[LayerReport, ...] = ()
    scales: ScalesReport | None = None  # None: no predecessor

    @property
    def speed(self) -> float | None:
        """Times FP32's speed."""
        return (
            None if not self.milliseconds or not self.fp32_milliseconds else self.fp32_milliseconds / self.milliseconds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    model: str
    bundle: str
    max_drop: float
    max_float_share: float
    calibration_rows: int
    heldout_rows: int
    parity: float | None  # largest relative difference of ONNX to torch; None for an ONNX source
    build_s: float
    is_gate_skipped: bool
    variants: tuple[VariantReport, ...]

    def variant(self, name: str) -> VariantReport:
        return next(variant for variant in self.variants if variant.name == name)


def write_report(report: BuildReport, folder: Path) -> None:
    (folder / FILE).write_bytes(to_json(report, indent=1) + b"\n")


def read_report(bundle: Path) -> BuildReport:
    """The report of an earlier bundle; raises `BuildError` where there is none."""
    try:
        return from_json((bundle / FILE).read_bytes(), BuildReport, str(bundle / FILE))
    except OSError as exc:
        raise BuildError(
            f"{bundle} has no readable {FILE} to start from: {exc.strerror}; accepted: a bundle folder that "
            "`outrider model build` wrote"
        ) from exc
    except ConfigError as exc:
        raise BuildError(str(exc)) from exc


def render(report: BuildReport) -> str:
    """The table printed at the end of a build."""
    lines = [
        f"{report.model}: {report.bundle} in {report.build_s:.1f} s, {report.calibration_rows} calibration rows, "
        f"{report.heldout_rows} held-out rows, loss allowed {report.max_drop}",
        f"{'variant':<10} {'loss':>7} {'90 % interval':>16} {'float MACs':>11} {'speed':>7} {'size':>10}  gate",
    ]
    for variant in report.variants:
        interval = f"{variant.loss.low:.4f}..{variant.loss.high:.4f}"
        speed = "-" if variant.speed is None else f"{variant.speed:.2f}x"
        gate = "held" if variant.is_within_gate else "MISSED"
        lines.append(
            f"{variant.name:<10} {variant.loss.value:>7.4f} {interval:>16} {variant.float_share:>10.1%} "
            f"{speed:>8} {variant.size_bytes / 1e6:>7.2f} MB  {gate}"
        )
    metric = report.variants[0].loss.metric
    lines.append(f"loss: {metric} against FP32; speed: times FP32, one row, one thread, on this machine")
    for variant in report.variants:
        if variant.float_layers:
            lines.append(f"{variant.name}: in float: {', '.join(variant.float_layers)}")
        if variant.layers:
            worst = sorted((x.sqnr_db, x.name) for x in variant.layers if x.sqnr_db is not None)[:3]
            lines.append(f"{variant.name}: noisiest: " + ", ".join(f"{name} {db:.1f} dB" for db, name in worst))
        if variant.scales is not None:
            lines.append(f"{variant.name}: {_render_scales(variant.scales)}")
    return "\n".join(lines)


def _render_scales(scales: ScalesReport) -> str:
    said = f"scales: recomputed, {scales.reason}"
    if scales.is_kept:
        whole = sum(one.kept == one.channels for one in scales.tensors)
        kept, channels = (sum(getattr(one, key) for one in scales.tensors) for key in ("kept", "channels"))
        said = f"scales: the predecessor's for {whole} of {len(scales.tensors)} tensors, {kept} of {channels} channels"
    if scales.delta_bytes is None or scales.delta_bytes_recomputed is None:
        return said
    saved = 1 - scales.delta_bytes / max(1, scales.delta_bytes_recomputed)
    return (
        f"{said}; delta to the predecessor (estimated): {scales.delta_bytes} bytes with kept scales, "
        f"{scales.delta_bytes_recomputed} with recomputed ones ({-saved:+.1%})"
    )
