"""``outrider model build`` and ``model echo``: the builder's command line. Cheap to import: torch loads if it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def register(subparsers: Any) -> None:
    """Adds ``model`` with its subcommands ``build`` and ``echo``."""
    model = subparsers.add_parser("model", help="build bundles: INT8 variants of a model, gated on accuracy")
    commands = model.add_subparsers(dest="model_command", required=True, metavar="COMMAND")
    build = commands.add_parser("build", help="quantize a model, check what it loses, write a bundle folder")
    build.add_argument("spec", type=Path, metavar="SPEC.toml", help="what to build; paths in it are relative to it")
    build.add_argument("--out", type=Path, required=True, metavar="DIR", help="the bundle folder to write")
    build.add_argument(
        "--successor-of",
        type=Path,
        metavar="BUNDLE",
        help="keep the scales of that bundle, and what it left in float",
    )
    build.add_argument(
        "--skip-gate", action="store_true", help="build even if INT8 loses too much; nodes will refuse it"
    )
    build.add_argument("--json", action="store_true", help="print the report as JSON")
    build.set_defaults(run=_build, reads="hardware.build.spec:ModelSpec")
    echo = commands.add_parser("echo", help="write a bundle without a checkpoint, for the engines echo and synthetic")
    echo.add_argument("--out", type=Path, required=True, metavar="DIR", help="the bundle folder to write")
    echo.add_argument("--name", default="echo", help="the model's name (default: %(default)s)")
    echo.add_argument("--datatype", default="FP32", help="of input x and output y (default: %(default)s)")
    echo.add_argument("--row", type=_shape, default=(16,), metavar="SHAPE", help="of one row, such as 3,224,224 (16)")
    echo.add_argument("--max-batch", type=int, default=64, help="rows (default: %(default)s)")
    echo.set_defaults(run=_echo)


def _build(arguments: argparse.Namespace) -> int:
    from common.config import to_json
    from hardware.build.build import build
    from hardware.build.report import render
    from hardware.build.spec import load_spec

    report = build(
        load_spec(arguments.spec),
        arguments.spec.parent,
        arguments.out,
        successor_of=arguments.successor_of,
        skip_gate=arguments.skip_gate,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(to_json(report, indent=1).decode() if arguments.json else render(report))
    return 0


def _echo(arguments: argparse.Namespace) -> int:
    from hardware.build.echo import VARIANT, write_echo

    folder = write_echo(
        arguments.out,
        name=arguments.name,
        datatype=arguments.datatype,
        row=arguments.row,
        max_batch=arguments.max_batch,
    )
    print(f'{folder} is ready for a node with engine.variants = ["{VARIANT}"] and engine.engines = ["echo"]')
    return 0


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not integers with commas, such as 3,224,224") from None
