"""`outrider cloud gateway|worker --config FILE`: a process on uvloop, until SIGTERM."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(subcommands: Any) -> None:
    cloud = subcommands.add_parser("cloud", help="run a gateway or a worker")
    actions = cloud.add_subparsers(required=True, metavar="ACTION")
    for name, run, text in (
        ("gateway", _run_gateway, "one address for a pool of workers"),
        ("worker", _run_worker, "full-precision models behind a gateway"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("--config", type=Path, required=True, help=f"the {name}'s TOML file")
        action.add_argument("--log", choices=("text", "json"), default="text")
        action.add_argument("--endpoint-file", type=Path, help="write name, pid and addresses here when serving (JSON)")
        action.set_defaults(run=run)


def _run_gateway(args: argparse.Namespace) -> int:
    from cloud.config import GatewayConfig
    from cloud.gateway import Gateway

    return _run(Gateway, GatewayConfig, args)


def _run_worker(args: argparse.Namespace) -> int:
    from cloud.config import WorkerConfig
    from cloud.worker import Worker

    return _run(Worker, WorkerConfig, args)


def _run(process: Any, kind: Any, args: argparse.Namespace) -> int:
    import uvloop

    from common.config import load_toml
    from common.telemetry.logs import set_up

    set_up(args.log)
    config = load_toml(args.config, kind)
    uvloop.run(_serve(process(config), args.endpoint_file))
    return 0


async def _serve(process: Any, endpoint_file: Path | None) -> None:
    from common.serving.lifetime import until_signal, write_endpoint

    async with process:
        write_endpoint(endpoint_file, process.endpoint())
        await until_signal()
