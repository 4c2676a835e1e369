"""The flags of every command that serves. Cheap to import: the servers load when one runs."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_run_arguments(parser: argparse.ArgumentParser, what: str, *, reads: str) -> None:
    """`reads` is the dataclass of the configuration file, as ``module:Class``."""
    parser.add_argument("--config", type=Path, required=True, help=f"the {what}'s TOML file")
    parser.add_argument("--log", choices=("text", "json"), default="text", help="form of the log on stderr")
    parser.add_argument("--endpoint-file", type=Path, help="write name, pid and addresses here when serving (JSON)")
    parser.add_argument("--check", action="store_true", help="only read the file: exit 0, or 2 and what is wrong in it")
    parser.set_defaults(reads=reads)
