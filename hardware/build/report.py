"""What a build measured: `report.json` beside the bundle's files, and the table that people read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
        raise BuildError(f"{bundle} has no readable {FILE} to start from: {exc.strerror}") from exc
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
    return "\n".join(lines)
