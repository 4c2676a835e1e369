"""`outrider`: one command whose subcommands are registered by the packages above, through entry points.

Owns the parser and the exit codes: 0 done, 1 an error that was explained, 2 wrong usage: flags, configuration files.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version

from common.errors import ConfigError, OutriderError

GROUP = "outrider.commands"
ORDER = ("up", "status", "model", "demo", "publish", "sync", "edge", "cloud", "keys")

Run = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C library writes to stderr what we say in our own words
    args = parser().parse_args(argv)
    run: Run = args.run
    try:
        return run(args)
    except OutriderError as exc:
        print(f"outrider: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, ConfigError) else 1
    except BrokenPipeError:  # the reader of our output left
        return 0
    except OSError as exc:  # a disk, a device: nothing that a traceback would explain
        print(f"outrider: {exc.filename or args.command}: {exc.strerror or exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="outrider", description="Model inference on the edge, the cloud behind it.")
    root.add_argument("--version", action="version", version=f"outrider {version('outrider')}")
    subcommands = root.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for entry in sorted(entry_points(group=GROUP), key=_position):
        entry.load()(subcommands)
    return root


def _position(entry: EntryPoint) -> tuple[int, str]:
    return (ORDER.index(entry.name) if entry.name in ORDER else len(ORDER), entry.name)


if __name__ == "__main__":
    raise SystemExit(main())
