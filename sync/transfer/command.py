"""`outrider sync export | import`: releases in one file, to a store that no network reaches."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_transfer(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    out = commands.add_parser("export", help="write what is desired now into one file, to carry it to another store")
    out.add_argument("--store", required=True, help="the store: a folder, or s3://bucket/prefix")
    out.add_argument("--model", action="append", default=[], help="may be repeated (default: every model)")
    out.add_argument("--version", help="refuse, if another version of the model is desired by now")
    out.add_argument("--base", metavar="VERSION", help="one that the other store has: its slabs stay out")
    out.add_argument("--out", type=Path, required=True, help="the file to write")
    out.add_argument("--json", action="store_true", help="one line on stdout")
    out.set_defaults(run=_export)
    take = commands.add_parser("import", help="verify such a file and take its releases into a store")
    take.add_argument("file", type=Path, help="what `sync export` wrote")
    take.add_argument("--store", required=True, help="the store: a folder, or s3://bucket/prefix")
    take.add_argument("--root", type=Path, help="the publisher's first root.json: for a store that has none yet")
    take.add_argument("--json", action="store_true", help="one line on stdout")
    take.set_defaults(run=_import)


def _export(args: argparse.Namespace) -> int:
    from common.clock import SystemClock
    from common.errors import ConfigError
    from sync.store.stores import open_store
    from sync.transfer.export import export

    if not args.out.parent.is_dir():
        raise ConfigError("sync export", "--out", f"{args.out.parent} is not there", "a file in a folder that is")
    store = open_store(args.store)
    done = export(store, args.out, models=args.model, version=args.version, base=args.base, clock=SystemClock())
    names = [f"{model}/{version}" for model, version in done.releases.items()]
    size = f"{done.slabs} slabs, {done.packs} packs, {done.bytes} bytes"
    print(f"{args.out}: {', '.join(names)}; {size}", file=sys.stderr)
    if args.json:
        print(json.dumps({"releases": done.releases, "slabs": done.slabs, "packs": done.packs, "bytes": done.bytes}))
    return 0


def _import(args: argparse.Namespace) -> int:
    from common.clock import SystemClock
    from common.errors import ConfigError
    from sync.store.stores import open_store
    from sync.transfer.take_in import take_in

    for flag, path in (("FILE", args.file), ("--root", args.root)):
        if path is not None and not path.is_file():
            raise ConfigError("sync import", flag, f"{path} is not there", "a file to read")
    root = None if args.root is None else args.root.read_bytes()
    done = take_in(args.file, open_store(args.store), root=root, clock=SystemClock())
    names = ", ".join(f"{model}/{version}" for model, version in done.releases.items())
    print(f"taken into {args.store}: {names}; {done.slabs_new} new slabs", file=sys.stderr)
    for name in done.not_here:
        print(f"{name} is signed as well, and not here: nodes that want it keep what they have", file=sys.stderr)
    role, until = min(done.expires.items(), key=lambda one: one[1])
    print(f"nodes take new releases from it until {until:%Y-%m-%d %H:%M} UTC ({role}, as signed)", file=sys.stderr)
    if args.json:
        facts = {"releases": done.releases, "slabs_new": done.slabs_new, "not_here": done.not_here}
        print(json.dumps(facts | {"expires": {name: when.isoformat() for name, when in done.expires.items()}}))
    return 0
