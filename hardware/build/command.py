"""``outrider model build``: the command line of the builder. Cheap to import: torch and onnx load when it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def register(subparsers: Any) -> None:
    """Adds ``model`` with its subcommand ``build``."""
    model = subparsers.add_parser("model", help="build bundles: INT8 variants of a model, gated on accuracy")
    commands = model.add_subparsers(dest="model_command", required=True, metavar="COMMAND")
    build = commands.add_parser("build", help="quantize a model, check what it loses, write a bundle folder")
    build.add_argument("spec", type=Path, metavar="SPEC.toml", help="what to build; paths in it are relative to it")
    build.add_argument("--out", type=Path, required=True, metavar="DIR", help="the bundle folder to write")
    build.add_argument("--successor-of", type=Path, metavar="BUNDLE", help="start from what that bundle left in float")
    build.add_argument(
        "--skip-gate", action="store_true", help="build even if INT8 loses too much; nodes will refuse it"
    )
    build.add_argument("--json", action="store_true", help="print the report as JSON")
    build.set_defaults(run=_build)


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
