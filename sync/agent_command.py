"""`outrider sync agent` and `outrider sync why`: an agent without a server around it, and what one did."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sync.agent.links import LinkInstaller
    from sync.agent.running import SyncOptions

_ENGINES: Final = ("onnxruntime", "torch", "tensorrt")


def add_agent(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    agent = commands.add_parser("agent", help="keep releases on this machine up to date for somebody else's engine")
    agent.add_argument("--folder", type=Path, required=True, help="journal, releases and current/MODEL links")
    agent.add_argument("--source", required=True, help="the sync service: host:port")
    agent.add_argument("--root", type=Path, required=True, help="the first root.json, brought here by a trusted way")
    agent.add_argument("--model", action="append", help="to keep (repeatable); every one where it is not given")
    agent.add_argument("--variant", action="append", help="wanted, in a release's order (repeatable); default: any")
    agent.add_argument(
        "--engine", action="append", help=f"whose files are wanted (repeatable); default: {', '.join(_ENGINES)}"
    )
    agent.add_argument("--interval-s", type=float, default=900.0, help="between two polls (%(default)s)")
    agent.add_argument("--window", help="HH:MM-HH:MM (UTC) in which may be fetched and installed")
    agent.add_argument("--broker", help="HOST:PORT of an MQTT broker for hints")
    agent.add_argument("--group", default="default", help="whose hints to listen to (%(default)s)")
    agent.add_argument("--name", default=socket.gethostname(), help="as which it reports (%(default)s)")
    agent.add_argument("--identity", help="folder that `outrider sync enrol` filled: TLS with this node's certificate")
    agent.add_argument("--ca", help="the CA's certificate; default: ca.pem in the identity's folder")
    agent.add_argument("--once", action="store_true", help="one poll, and exit: 0 when nothing is left to do")
    agent.set_defaults(run=_agent)


def add_why(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    why = commands.add_parser("why", help="why a node serves what it serves: desired, active, reason, next try")
    why.add_argument("node", type=Path, metavar="NODE", help="a node's state folder")
    why.add_argument("model", nargs="?", metavar="MODEL", help="this model alone")
    why.add_argument("--json", action="store_true", help="one line on stdout")
    why.set_defaults(run=_why)


def _agent(args: argparse.Namespace) -> int:
    import asyncio

    from common.telemetry.logs import EventLog
    from sync.agent.links import LinkInstaller
    from sync.agent.running import running_agent
    from sync.telemetry import log_sync

    events = EventLog()
    log_sync(events)
    folder = args.folder.resolve()
    installer = LinkInstaller(folder / "current", tuple(args.variant or ()))
    options, engines = _options(args), tuple(args.engine or _ENGINES)
    if args.once:
        return _once(options, folder, installer, engines, args.name)

    async def run() -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        agent = running_agent(
            options, folder, installer, name=args.name, engines=engines, on_event=events, in_memory=False
        )  # links on a disk cannot lead to what is in memory for a while
        async with agent:
            print(f"agent: releases in {args.folder}, from {args.source}", file=sys.stderr, flush=True)
            await stopped.wait()

    asyncio.run(run())
    return 0


def _options(args: argparse.Namespace) -> SyncOptions:
    """Of a `[sync]` table; checked as one. No probation: nobody here sees how the engine does."""
    from common.config import parse
    from sync.agent.running import SyncOptions

    names = ("source", "broker", "group", "interval_s", "window", "identity", "ca")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    given |= {"root": str(args.root), "min_gap_s": min(1.0, args.interval_s), "probation_s": 0.0}
    if args.model:
        given["models"] = args.model
    return parse(given, SyncOptions, "sync agent")


def _once(options: SyncOptions, folder: Path, installer: LinkInstaller, engines: tuple[str, ...], name: str) -> int:
    from sync.agent.agent import Agent
    from sync.agent.running import agent_config, reporter_of

    config = agent_config(options, folder, engines)
    with Agent(config, installer, reporter=reporter_of(options, name, config.identity)) as agent:
        agent.restore()
        is_ok = agent.run_once()
        for one in agent.status():
            print(f"{one.model}: {one.state} version {one.version or '-'}, serves {one.active or '-'}  {one.reason}")
        if agent.last_error is not None:
            print(agent.last_error, file=sys.stderr)
    return 0 if is_ok else 1


def _why(args: argparse.Namespace) -> int:
    from common.errors import ConfigError
    from sync.agent.why import find_journal, last_poll, poll_line, poll_to_dict, screen, why

    journal = find_journal(args.node)
    found = why(journal, args.model)
    if args.model is not None and not found:
        raise ConfigError(
            "sync why", "MODEL", f"{args.node} knows no model {args.model!r}", "a model that it was given"
        )
    if args.json:
        print(json.dumps({"models": [one.to_dict() for one in found], "poll": poll_to_dict(last_poll(journal))}))
    elif not found:
        print("no model yet: the node has not heard of a desired state")
        print(f"  last poll  {poll_line(last_poll(journal))}")
    else:
        print("\n".join(line for one in found for line in screen(one)))
    return 0
