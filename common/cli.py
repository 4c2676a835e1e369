"""`outrider`: one command whose subcommands are registered by the packages above, through entry points.

Owns the parser and the exit codes: 0 done, 1 an error that was explained, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version

from common.errors import OutriderError

GROUP = "outrider.commands"
ORDER = ("up", "status", "model", "demo", "publish", "sync", "edge", "cloud")

Run = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    run: Run = args.run
    try:
        return run(args)
    except OutriderError as exc:
        print(f"outrider: {exc}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output left
        return 0
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="outrider", description="Model inference on the edge, the cloud behind it.")
    root.add_argument("--version", action="version", version=f"outrider {version('outrider')}")
    subcommands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for entry in sorted(entry_points(group=GROUP), key=_position):
        entry.load()(subcommands)
    return root


def _position(entry: EntryPoint) -> tuple[int, str]:
    return (ORDER.index(entry.name) if entry.name in ORDER else len(ORDER), entry.name)


if __name__ == "__main__":
    raise SystemExit(main())
