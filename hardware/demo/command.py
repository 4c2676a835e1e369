"""``outrider demo prepare``: the command line of the demo models. Cheap to import: torch loads when it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

_MODELS = ("efficientnet-lite0", "digits")
_STAGES = ("v1", "v2", "v3", "collapsed", "v4")


def register(subparsers: Any) -> None:
    """Adds ``demo`` with its subcommand ``prepare``."""
    demo = subparsers.add_parser("demo", help="models to try the system on, from installed packages")
    commands = demo.add_subparsers(dest="demo_command", required=True, metavar="COMMAND")
    prepare = commands.add_parser("prepare", help="write model.toml, checkpoint and data for `outrider model build`")
    prepare.add_argument("model", choices=_MODELS, metavar="MODEL", help=" or ".join(_MODELS))
    prepare.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
    prepare.add_argument("--stage", choices=_STAGES, default="v1", help="of digits: how far it is trained (v1)")
    prepare.set_defaults(run=_prepare)


def _prepare(arguments: argparse.Namespace) -> int:
    from hardware.demo.prepare import prepare

    prepare(arguments.model, arguments.out, stage=arguments.stage, progress=lambda line: print(line, file=sys.stderr))
    print(
        f"{arguments.out / 'model.toml'} is ready for: outrider model build {arguments.out / 'model.toml'} --out BUNDLE"
    )
    return 0
