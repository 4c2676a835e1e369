"""`outrider sync serve | broker`: the parameter path's processes. Each is imported when it starts.

`keys`, `ca` and `enrol`, and `diff` and `inspect`, which look at files, are next door.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from sync.agent_command import add_agent, add_why
from sync.diff.command import add_diff, add_inspect
from sync.fleet_command import add_fleet
from sync.pki.command import add_broker_tls, add_ca, add_enrol, add_serve_tls
from sync.transfer.command import add_transfer
from sync.trust.command import add_keys
from sync.upkeep.command import add_store

if TYPE_CHECKING:
    from sync.service import ServiceConfig

BESIDE = "outrider.commands.sync"  # entry points of packages above, which this one does not import


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sync = subparsers.add_parser("sync", help="parameter releases: service, broker, keys, files")
    commands = sync.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_broker(commands)
    add_agent(commands)
    add_why(commands)
    add_fleet(commands)
    add_keys(commands)
    add_ca(commands)
    add_enrol(commands)
    add_store(commands)
    add_transfer(commands)
    add_diff(commands)
    add_inspect(commands)
    for entry in entry_points(group=BESIDE):
        entry.load()(commands)


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser("serve", help="serve a store's releases over gRPC, with hints over MQTT")
    serve.add_argument("--config", type=Path, help="TOML file with the settings below; flags win")
    serve.add_argument("--store", help="the store: a folder, or s3://bucket/prefix")
    serve.add_argument("--keys", help="folder with the online keys: signatures are then renewed here")
    serve.add_argument("--host", help="address to bind (127.0.0.1)")
    serve.add_argument("--port", type=int, help="0 (default): a free one")
    serve.add_argument("--broker", help="HOST:PORT of an MQTT broker for hints")
    serve.add_argument("--group", help="nodes' group in the hint's topic (default)")
    serve.add_argument("--spread-ms", type=int, help="window over which nodes spread after a hint (0)")
    serve.add_argument("--name", help="name in the endpoint file (sync)")
    serve.add_argument("--state", help="folder for what nodes report: `outrider sync fleet` reads it")
    add_serve_tls(serve)
    serve.add_argument("--check", action="store_true", help="only read the settings: exit 0, or 2 and what is wrong")
    _add_endpoint_file(serve)
    serve.set_defaults(run=_serve, reads="sync.service:ServiceConfig")


def _add_broker(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    broker = commands.add_parser("broker", help="run the embedded MQTT broker")
    broker.add_argument("--host", default="127.0.0.1", help="address to bind (%(default)s)")
    broker.add_argument("--port", type=int, default=0, help="0 (default): a free one")
    broker.add_argument("--name", default="broker", help="name in the endpoint file (%(default)s)")
    add_broker_tls(broker)
    _add_endpoint_file(broker)
    broker.set_defaults(run=_broker)


def _add_endpoint_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoint-file", type=Path, help="written when ready: JSON with name, pid and address")


def _serve(args: argparse.Namespace) -> int:
    from sync.service import enrolling, service

    config = _service_config(args)
    if args.check:
        print(f"{args.config or 'the command line'} is sound")
        return 0

    async def run() -> None:
        async with _until_signal() as stopped, service(config) as address, enrolling(config) as enrol:
            _ready(args.endpoint_file, config.name, "grpc", address, enrol=enrol)
            await stopped.wait()

    asyncio.run(run())
    return 0


def _broker(args: argparse.Namespace) -> int:
    from sync.broker import broker

    async def run() -> None:
        tls = {"ca": args.ca, "dns": args.dns, "is_insecure": args.insecure}
        async with _until_signal() as stopped, broker(args.host, args.port, **tls) as address:
            _ready(args.endpoint_file, args.name, "mqtt", address)
            await stopped.wait()

    asyncio.run(run())
    return 0


def _service_config(args: argparse.Namespace) -> ServiceConfig:
    """The file's settings, flags over them; checked as one."""
    import dataclasses
    import tomllib

    from common.config import parse
    from common.errors import ConfigError
    from sync.service import ServiceConfig

    data: dict[str, object] = {}
    if args.config is not None:
        try:
            data = tomllib.loads(args.config.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as exc:
            raise ConfigError(str(args.config), "", f"cannot be read: {exc}", "a readable TOML file") from exc
    names = [field.name for field in dataclasses.fields(ServiceConfig)]
    data |= {name: value for name in names if (value := getattr(args, name)) is not None}
    return parse(data, ServiceConfig, str(args.config or "command line"))


def _ready(endpoint_file: Path | None, name: str, kind: str, address: str, enrol: str | None = None) -> None:
    from sync.disk import write_atomic

    where = {kind: address} | ({} if enrol is None else {"enrol": enrol})
    for one, at in where.items():
        print(f"{name}: {one} on {at}", file=sys.stderr, flush=True)
    if endpoint_file is not None:
        write_atomic(endpoint_file, json.dumps({"name": name, "pid": os.getpid()} | where).encode())


@contextlib.asynccontextmanager
async def _until_signal() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM or SIGINT sets."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        yield stopped
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
