"""`outrider sync serve | broker | keys init`: the parameter path's processes. Each is imported when it starts.

`diff` and `inspect`, which look at files, are next door.
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
from pathlib import Path
from typing import TYPE_CHECKING

from sync.diff.command import add_diff, add_inspect

if TYPE_CHECKING:
    from sync.service import ServiceConfig


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sync = subparsers.add_parser("sync", help="parameter releases: service, broker, keys, files")
    commands = sync.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_broker(commands)
    _add_keys(commands)
    add_diff(commands)
    add_inspect(commands)


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser("serve", help="serve a store's releases over gRPC, with hints over MQTT")
    serve.add_argument("--config", type=Path, help="TOML file with the settings below; flags win")
    serve.add_argument("--store", help="the store's folder")
    serve.add_argument("--keys", help="folder with the online keys: signatures are then renewed here")
    serve.add_argument("--host", help="address to bind (127.0.0.1)")
    serve.add_argument("--port", type=int, help="0 (default): a free one")
    serve.add_argument("--broker", help="HOST:PORT of an MQTT broker for hints")
    serve.add_argument("--group", help="nodes' group in the hint's topic (default)")
    serve.add_argument("--spread-ms", type=int, help="window over which nodes spread after a hint (0)")
    serve.add_argument("--name", help="name in the endpoint file (sync)")
    serve.add_argument("--check", action="store_true", help="only read the settings: exit 0, or 2 and what is wrong")
    _add_endpoint_file(serve)
    serve.set_defaults(run=_serve, reads="sync.service:ServiceConfig")


def _add_broker(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    broker = commands.add_parser("broker", help="run the embedded MQTT broker")
    broker.add_argument("--host", default="127.0.0.1", help="address to bind (%(default)s)")
    broker.add_argument("--port", type=int, default=0, help="0 (default): a free one")
    broker.add_argument("--name", default="broker", help="name in the endpoint file (%(default)s)")
    _add_endpoint_file(broker)
    broker.set_defaults(run=_broker)


def _add_keys(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    keys = commands.add_parser("keys", help="signing keys").add_subparsers(required=True, metavar="COMMAND")
    init = keys.add_parser("init", help="make one key per role, sign the first root and an empty store")
    init.add_argument("--keys", type=Path, required=True, help="folder for the private keys (made with mode 0700)")
    init.add_argument("--store", type=Path, required=True, help="the store's folder")
    init.add_argument("--root", type=Path, help="also write root.json here: nodes are given this file")
    init.add_argument("--if-absent", action="store_true", help="do nothing when the store is signed already")
    init.set_defaults(run=_keys_init)
    status = keys.add_parser("status", help="how long each signature holds; exit 1 where one is past half of its life")
    status.add_argument("--store", type=Path, required=True, help="the store's folder")
    status.add_argument("--keys", type=Path, help="folder with private keys: says which roles they can sign")
    status.add_argument("--json", action="store_true", help="one line on stdout")
    status.set_defaults(run=_keys_status)


def _add_endpoint_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoint-file", type=Path, help="written when ready: JSON with name, pid and address")


def _serve(args: argparse.Namespace) -> int:
    from sync.service import service

    config = _service_config(args)
    if args.check:
        print(f"{args.config or 'the command line'} is sound")
        return 0

    async def run() -> None:
        async with _until_signal() as stopped, service(config) as address:
            _ready(args.endpoint_file, config.name, "grpc", address)
            await stopped.wait()

    asyncio.run(run())
    return 0


def _broker(args: argparse.Namespace) -> int:
    from sync.broker import broker

    async def run() -> None:
        async with _until_signal() as stopped, broker(args.host, args.port) as address:
            _ready(args.endpoint_file, args.name, "mqtt", address)
            await stopped.wait()

    asyncio.run(run())
    return 0


def _keys_init(args: argparse.Namespace) -> int:
    from common.errors import ConfigError
    from sync.store import TIMESTAMP, Store, write_atomic
    from sync.trust.keys import Keys
    from sync.trust.repository import Repository

    for flag, folder in (("--keys", args.keys), ("--store", args.store)):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700 if flag == "--keys" else 0o755)
        except OSError as exc:
            problem = f"{folder} cannot be used: {exc.strerror}"
            raise ConfigError("sync keys init", flag, problem, "a folder to write in") from exc
    store = Store(args.store)
    with store.lock():
        if args.if_absent and store.read(TIMESTAMP) is not None:
            keys = Keys(args.keys)
            root = Repository(store, keys).root()
        else:
            keys = Keys.create(args.keys, purpose=str(args.store.resolve()))
            root = Repository(store, keys).create()
        keys.finish()
    if args.root is not None:
        write_atomic(args.root, root)
    print(f"keys in {args.keys}, signed metadata in {args.store}", file=sys.stderr)
    return 0


def _keys_status(args: argparse.Namespace) -> int:
    from common.clock import SystemClock
    from sync.store import Store
    from sync.trust.keys import Keys
    from sync.trust.repository import Lives, Repository
    from sync.trust.status import role_status

    keys = None if args.keys is None else Keys(args.keys)
    repository = Repository(Store(args.store), Keys(args.keys or Path()))
    found = role_status(repository, keys, SystemClock().now(), lives=Lives())
    if args.json:
        print(json.dumps({"roles": [one.to_dict() for one in found]}))
    else:
        for one in found:
            signs = "" if keys is None else ", can be signed" if one.can_sign else ", its key is not here"
            state = "EXPIRED" if one.is_expired else "past half of its life" if one.is_due else "good"
            ids = " ".join(keyid[:8] for keyid in one.keyids)
            when = f"version {one.version}, until {one.expires:%Y-%m-%d %H:%M} ({100 * one.left:.0f} % left)"
            print(f"{one.role:9}  {when}, {one.threshold} of [{ids}]{signs}: {state}")
    return 1 if any(one.is_due for one in found) else 0


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


def _ready(endpoint_file: Path | None, name: str, kind: str, address: str) -> None:
    from sync.store import write_atomic

    print(f"{name}: {kind} on {address}", file=sys.stderr, flush=True)
    if endpoint_file is not None:
        write_atomic(endpoint_file, json.dumps({"name": name, "pid": os.getpid(), kind: address}).encode())


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
