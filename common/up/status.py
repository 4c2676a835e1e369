"""`outrider status`: what the running system serves, read from its own endpoints."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

from common.errors import ConfigError, OutriderError


def register(subcommands: Any) -> None:
    status = subcommands.add_parser("status", help="what the running system serves, and where")
    status.add_argument("--state", type=Path, default=default_state(), help="folder of `up` (default: %(default)s)")
    status.add_argument("--json", action="store_true", help="the same for scripts")
    status.set_defaults(run=_run)


def default_state() -> Path:
    """Where the XDG directory specification has it: a relative path in the variable counts as none."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.local/state")  # Path's own raises for who has no home
    return Path(base) / "outrider"


def _run(args: argparse.Namespace) -> int:
    status = asyncio.run(gather(args.state))
    print(json.dumps(status, indent=1) if args.json else table(status))
    return 0 if status["is_ready"] else 1


async def gather(state: Path) -> dict[str, Any]:
    """endpoints.json with, for each process, whether it is ready and what it serves now.

    Raises `ConfigError` where no system runs in `state`.
    """
    from common.up.client import Client

    try:
        status: dict[str, Any] = json.loads((state / "endpoints.json").read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigError(
            "status", "--state", f"no system runs in {state}", "the state folder of `outrider up`"
        ) from exc
    async with Client() as client:
        for process in status["processes"]:
            await _look(process, client)
    status["is_ready"] = all(process["is_ready"] for process in status["processes"])
    return status


async def _look(process: dict[str, Any], client: Any) -> None:
    expected = process.pop("models")
    process["serves"] = {}
    base = process.get("http")
    if base is None:
        process["is_ready"] = process.get("pid") is not None and Path(f"/proc/{process['pid']}").exists()
        return
    try:
        process["serves"] = await client.index(base)
        ready = [name for name, entry in process["serves"].items() if entry["state"] == "READY"]
        process["is_ready"] = await client.is_ready(base) and set(expected) <= set(ready)
    except OutriderError as exc:
        process["is_ready"] = False
        process["problem"] = str(exc)


def table(status: dict[str, Any]) -> str:
    """One line per process: name, kind, pid, addresses, models with version and state."""
    rows = [("PROCESS", "KIND", "PID", "HTTP", "GRPC/OTHER", "SERVES")]
    for one in status["processes"]:
        serves = ", ".join(
            f"{name} {entry['version']}".strip() + ("" if entry["state"] == "READY" else f" ({entry['state'].lower()})")
            for name, entry in sorted(one["serves"].items())
        )
        other = one.get("grpc") or one.get("mqtt") or "-"
        rows.append(
            (
                one["name"],
                one["kind"],
                str(one.get("pid", "-")),
                one.get("http") or "-",
                other,
                serves or one.get("problem", "-"),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[5]]) for row in rows
    )
