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
    prepare.add_argument(
        "--stage",
        action="append",
        choices=_STAGES,
        help="of digits: how far it is trained (v1); given several times, each is written to DIR/MODEL-STAGE",
    )
    prepare.set_defaults(run=_prepare)


def _prepare(arguments: argparse.Namespace) -> int:
    from common.errors import ConfigError

    out: Path = arguments.out
    try:
        out.mkdir(parents=True, exist_ok=True)  # before the minutes that it takes to have something to write
    except OSError as exc:
        raise ConfigError("demo", "--out", f"{out} cannot be used: {exc.strerror}", "a folder to write in") from exc

    from hardware.demo.prepare import DEFAULT_STAGE, prepare, prepare_stages

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    stages = arguments.stage or [DEFAULT_STAGE]
    if len(stages) > 1:
        prepare_stages(arguments.model, out, stages, progress=say)
        print(f"{out / arguments.model}-{{{','.join(stages)}}}/model.toml are ready for: outrider model build")
    else:
        prepare(arguments.model, out, stage=stages[0], progress=say)
        print(f"{out / 'model.toml'} is ready for: outrider model build {out / 'model.toml'} --out BUNDLE")
    return 0
