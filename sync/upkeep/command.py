"""`outrider sync gc | verify`: a store's housekeeping, from its folder or bucket alone. No key is needed."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sync.store.stores import AnyStore
    from sync.upkeep.check import Finding
    from sync.upkeep.collect import Collected
    from sync.upkeep.repair import Report

_UNITS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_BYTES: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]?)(i?)B?", re.IGNORECASE)


def add_store(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    gc = commands.add_parser("gc", help="remove from a store what no kept release needs")
    gc.add_argument("--store", required=True, help="the store: a folder, or s3://bucket/prefix")
    gc.add_argument("--keep", type=int, metavar="N", help="releases of each model, by content (4; at least 2)")
    gc.add_argument("--quota", metavar="BYTES", help="fewer packs and releases until this is met: 500MB, 10GB, 1.5GiB")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    gc.add_argument("--json", action="store_true", help="one line on stdout")
    gc.set_defaults(run=_gc)
    verify = commands.add_parser("verify", help="hash everything in a store again; exit 1 where something is wrong")
    verify.add_argument("--store", required=True, help="the store: a folder, or s3://bucket/prefix")
    verify.add_argument("--repair", action="store_true", help="make anew what can be made from the rest")
    verify.add_argument("--json", action="store_true", help="one line on stdout")
    verify.set_defaults(run=_verify)


def _gc(args: argparse.Namespace) -> int:
    from common.errors import ConfigError
    from sync.upkeep.collect import KEEP, collect
    from sync.upkeep.retention import MIN_KEPT

    store = _signed_store(args.store, "sync gc")
    keep = KEEP if args.keep is None else args.keep
    if keep < MIN_KEPT:
        accepted = f"{MIN_KEPT} or more: what is desired, and the one before"
        raise ConfigError("sync gc", "--keep", f"got {keep}", accepted)
    quota = None if args.quota is None else parse_bytes(args.quota, "sync gc", "--quota")
    done = collect(store, keep=keep, quota_bytes=quota, is_dry_run=args.dry_run)
    if args.json:
        print(json.dumps(_collected(done)))
    else:
        _print_collected(done)
    if done.over_bytes:
        problem = f"the quota of {done.quota_bytes} bytes is missed by {done.over_bytes}"
        print(f"{problem}: what is left is desired, the release before it, or signed", file=sys.stderr)
    return 1 if done.over_bytes else 0


def _signed_store(address: str, where: str) -> AnyStore:
    """A wrong path is no store: nothing is made there."""
    from common.errors import ConfigError
    from sync.store.stores import open_store

    store = open_store(address)
    if next(store.files("metadata"), None) is None:
        raise ConfigError(where, "--store", f"{store.where()} has no signed metadata", "a store that was published to")
    return store


def _collected(done: Collected) -> dict[str, object]:
    return {
        "kept": done.kept,
        "removed": done.removed,
        "bytes_removed": done.bytes_removed,
        "bytes_left": done.bytes_left,
        "quota_bytes": done.quota_bytes,
        "over_bytes": done.over_bytes,
        "dry_run": done.is_dry_run,
    }


def _print_collected(done: Collected) -> None:
    for model, versions in done.kept.items():
        print(f"{model}: kept {', '.join(map(str, versions))}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in done.removed.items()) or "nothing"
    verb = "would be removed" if done.is_dry_run else "removed"
    print(f"{verb}: {kinds}; {done.bytes_removed} bytes, {done.bytes_left} are left")


def _verify(args: argparse.Namespace) -> int:
    from sync.upkeep.repair import verify

    report = verify(_signed_store(args.store, "sync verify"), repair=args.repair)
    if args.json:
        print(json.dumps({"good": report.is_good, "counts": report.counts, "findings": _findings(report)}))
    else:
        for one in report.findings:
            print(_line(one))
        for kind, states in report.counts.items():
            if states:
                print(f"{kind}: {', '.join(f'{count} {state}' for state, count in states.items())}")
    return 0 if report.is_good else 1


def _findings(report: Report) -> list[dict[str, object]]:
    return [
        {
            "kind": one.kind,
            "name": one.name,
            "state": one.state,
            "problem": one.problem,
            "outcome": one.outcome,
            "healed": one.is_healed,
        }
        for one in report.findings
    ]


def _line(one: Finding) -> str:
    return f"{one.name}: {'was ' if one.is_healed else ''}{one.state} ({one.problem}): {one.outcome}"


def parse_bytes(text: str, where: str, key: str) -> int:
    """`10GB` (10^9 each), `10GiB` (2^30 each), or plain bytes. Raises `ConfigError`."""
    from common.errors import ConfigError

    match = _BYTES.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ConfigError(where, key, f"got {text!r}", "bytes, or a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2].upper()])
