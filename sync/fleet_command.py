"""`outrider sync fleet`: what the nodes last said of themselves. Cheap to import."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sync.fleet import NodeReport

_LATE_S: Final = 3600.0


def add_fleet(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    fleet = commands.add_parser("fleet", help="the nodes: what each serves, where it stands, its last contact")
    fleet.add_argument("state", type=Path, metavar="STATE", help="the sync service's state folder (`serve --state`)")
    fleet.add_argument("--model", help="this model alone")
    fleet.add_argument(
        "--late-s", type=float, default=_LATE_S, help="nodes not heard of for so long are marked late (%(default)s)"
    )
    fleet.add_argument("--json", action="store_true", help="one line on stdout")
    fleet.set_defaults(run=_fleet)


def _fleet(args: argparse.Namespace) -> int:
    from common.errors import ConfigError
    from sync.fleet import DATABASE, read_fleet

    path = args.state / DATABASE
    if not path.is_file():
        raise ConfigError("sync fleet", "STATE", f"{args.state} has no {DATABASE}", "the folder of `serve --state`")
    now, found = time.time(), read_fleet(path)
    if args.json:
        print(json.dumps({"now": now, "nodes": [one.to_dict() for one in found]}))
        return 0
    versions: dict[tuple[str, str], int] = {}
    for node in found:
        for line in _lines(node, now - node.at, args.model, args.late_s):
            print(line)
        for one in node.models:
            key = one.model, one.active or "cloud only"
            versions[key] = versions.get(key, 0) + 1
    late = sum(now - node.at > args.late_s for node in found)
    print(f"{len(found)} nodes, {late} late")
    for (model, version), count in sorted(versions.items()):
        if args.model in (None, model):
            print(f"  {model} {version}: {count}")
    return 0


def _lines(node: NodeReport, age_s: float, model: str | None, late_s: float) -> list[str]:
    heard = f"{age_s:.0f} s ago{', LATE' if age_s > late_s else ''}"
    lines = [f"{node.node}  {heard}" + (f"  poll: {node.problem}" if node.problem else "")]
    for one in node.models:
        if model in (None, one.model):
            said = f"  {one.code} {one.reason}".rstrip()
            serves = one.active or "nothing (cloud)"
            lines.append(f"  {one.model}  serves {serves}  {one.state} {one.version or '-'}{said}")
    return lines
