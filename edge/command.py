"""`outrider edge run --config node.toml`: a node in a process of its own, on uvloop, until SIGTERM."""

from __future__ import annotations

import argparse
from typing import Any

from common.transport.arguments import add_run_arguments


def register(subcommands: Any) -> None:
    edge = subcommands.add_parser("edge", help="run an edge node")
    actions = edge.add_subparsers(required=True, metavar="ACTION")
    action = actions.add_parser("run", help="serve until SIGTERM")
    add_run_arguments(action, "node", reads="edge.config:NodeConfig")
    action.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from common.transport.process import run
    from edge.config import NodeConfig
    from edge.node import Node

    return run(Node, NodeConfig, args)
