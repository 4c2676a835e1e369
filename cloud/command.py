"""`outrider cloud gateway|worker --config FILE`: each in a process of its own, on uvloop, until SIGTERM."""

from __future__ import annotations

import argparse
from typing import Any

from common.transport.arguments import add_run_arguments


def register(subcommands: Any) -> None:
    cloud = subcommands.add_parser("cloud", help="run a gateway or a worker")
    actions = cloud.add_subparsers(required=True, metavar="ACTION")
    for name, run, config, text in (
        ("gateway", _run_gateway, "GatewayConfig", "one address for a pool of workers"),
        ("worker", _run_worker, "WorkerConfig", "full-precision models behind a gateway"),
    ):
        action = actions.add_parser(name, help=text)
        add_run_arguments(action, name, reads=f"cloud.config:{config}")
        action.set_defaults(run=run)


def _run_gateway(args: argparse.Namespace) -> int:
    from cloud.config import GatewayConfig
    from cloud.gateway import Gateway
    from common.transport.process import run

    return run(Gateway, GatewayConfig, args)


def _run_worker(args: argparse.Namespace) -> int:
    from cloud.config import WorkerConfig
    from cloud.worker import Worker
    from common.transport.process import run

    return run(Worker, WorkerConfig, args)
