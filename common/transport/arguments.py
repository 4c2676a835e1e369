"""The flags of every command that serves. Cheap to import: the servers load when one runs."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_run_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--config", type=Path, required=True, help=f"the {what}'s TOML file")
    parser.add_argument("--log", choices=("text", "json"), default="text")
    parser.add_argument("--endpoint-file", type=Path, help="write name, pid and addresses here when serving (JSON)")
