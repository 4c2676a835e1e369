"""`outrider up`: the whole system on this machine, in the foreground, until Ctrl-C. With `--once`: the tour."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.up.layout import CAUSES, PORTS, Layout
from common.up.ports import DEFAULT_BASE, fixed, free
from common.up.status import default_state

if TYPE_CHECKING:
    from common.up.system import System

MAX_INTERVAL_S = 7 * 86_400.0


def register(subcommands: Any) -> None:
    up = subcommands.add_parser("up", help="run the whole system on this machine")
    up.add_argument("--state", type=Path, default=default_state(), help="state folder (default: %(default)s)")
    up.add_argument("--bundles", type=Path, help="keep sources and bundles here, and reuse what is there")
    up.add_argument(
        "--base-port", type=int, default=DEFAULT_BASE, help="first of a dozen ports; 0: any free ones (%(default)s)"
    )
    up.add_argument(
        "--interval-s", type=float, default=900.0, help="seconds between polls of nodes and workers (%(default)s)"
    )
    up.add_argument(
        "--once", action="store_true", help="take the tour in a temporary state folder, then stop: exit 0 or 1"
    )
    up.add_argument("--only", metavar="STEPS", help="of the tour: these steps alone, for example ab")
    up.add_argument("--keep-going", action="store_true", help="of the tour: go on after a step that failed")
    up.add_argument(
        "--without", action="append", default=[], choices=CAUSES, help="take a cause away: the tour must fail"
    )
    up.add_argument(
        "--patience-s", type=float, default=20.0, help="of the tour, for each thing it waits for (%(default)s)"
    )
    up.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    for flag, value, least, most in (
        ("--interval-s", args.interval_s, 0.1, MAX_INTERVAL_S),
        ("--patience-s", args.patience_s, 0.1, 3600.0),
    ):
        if not least <= value <= most:
            raise ConfigError("up", flag, f"got {value:g}", f"seconds, {least:g} to {most:g}")
    try:
        return asyncio.run(_once(args) if args.once else _up(args))
    except KeyboardInterrupt:
        return 130


async def _up(args: argparse.Namespace) -> int:
    from common.serving.lifetime import until_signal
    from common.up.demo import DIGITS, PHOTOS
    from common.up.system import System, owning

    say = _sayer()
    async with owning(args.state):
        ports = fixed(PORTS, args.base_port) if args.base_port else free(PORTS)
        layout = Layout(state=args.state, ports=ports, models=(PHOTOS, DIGITS), interval_s=args.interval_s)
        system = System(layout, bundles=args.bundles, say=say)
        stopping = asyncio.create_task(until_signal())
        serving = asyncio.create_task(_serve(system, stopping, say))
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            say("stopping")
            if not system.is_up:
                serving.cancel()
        try:
            await serving
        except asyncio.CancelledError:
            return 130
        finally:
            stopping.cancel()
    say("stopped")
    return 0


async def _serve(system: System, stopping: asyncio.Task[None], say: Any) -> None:
    from common.up.status import gather, table

    started = time.monotonic()
    await system.prepare()
    async with system:
        say(f"ready in {time.monotonic() - started:.1f} s")
        print("\n" + table(await gather(system.layout.state)) + "\n\n" + calls(system), flush=True)
        await asyncio.wait((stopping,))


def calls(system: System) -> str:
    """Three calls to copy: a photo on the edge, the same through a node that must ask the cloud, a release."""
    from common.up.demo import DIGITS, PHOTOS

    photo = sorted((system.work / "sources" / PHOTOS.source / "photos").iterdir())[0]
    spec = system.work / "sources" / DIGITS.source / "model.toml"
    classify = f"curl -i -F image=@{photo}"
    release = f"{_executable()} publish {spec} --force --bundles {system.work / 'bundles'}"
    return "\n".join(
        (
            "Try:",
            f"  {classify} {system.http('edge-a')}/v2/models/{PHOTOS.name}/classify",
            f"  {classify} {system.http('edge-b')}/v2/models/{PHOTOS.name}/classify",
            f"  {release} --store {system.layout.store} --keys {system.layout.keys}",
            "Ctrl-C stops everything.",
        )
    )


def _executable() -> str:
    """`outrider` as a shell finds it: by its path, where the virtual environment was not activated."""
    return "outrider" if shutil.which("outrider") else str(Path(sys.executable).with_name("outrider"))


async def _once(args: argparse.Namespace) -> int:
    from common.serving.lifetime import until_signal
    from common.up.tour import take

    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        tour = asyncio.create_task(
            take(
                Path(folder),
                ports=free(PORTS),
                bundles=args.bundles,
                only=args.only,
                without=frozenset(args.without),
                patience_s=args.patience_s,
                keeps_going=args.keep_going,
                say=_sayer(),
            )
        )
        stopping = asyncio.create_task(until_signal())
        await asyncio.wait((tour, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not tour.done():
            tour.cancel()
        stopping.cancel()
        try:
            return 0 if await tour else 1
        except asyncio.CancelledError:
            return 130


def _sayer() -> Any:
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {line}", file=sys.stderr, flush=True)

    return say
