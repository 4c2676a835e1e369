"""`outrider edge run --config node.toml`: a node in a process of its own, on uvloop, until SIGTERM."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(subcommands: Any) -> None:
    edge = subcommands.add_parser("edge", help="run an edge node")
    actions = edge.add_subparsers(required=True, metavar="ACTION")
    run = actions.add_parser("run", help="serve until SIGTERM")
    run.add_argument("--config", type=Path, required=True, help="the node's TOML file")
    run.add_argument("--log", choices=("text", "json"), default="text")
    run.add_argument("--endpoint-file", type=Path, help="write name, pid and addresses here when serving (JSON)")
    run.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    import uvloop

    from common.config import load_toml
    from common.telemetry.logs import set_up
    from edge.config import NodeConfig

    set_up(args.log)
    config = load_toml(args.config, NodeConfig)
    uvloop.run(_serve(config, args.endpoint_file))
    return 0


async def _serve(config: Any, endpoint_file: Path | None) -> None:
    from common.serving.lifetime import until_signal, write_endpoint
    from edge.node import Node

    async with Node(config) as node:
        write_endpoint(endpoint_file, node.endpoint())
        await until_signal()
