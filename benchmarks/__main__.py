"""`python -m benchmarks [NAME ...]`: the benchmarks by name, all of them by default; tables on stdout.

`--quick` for a look. The models that some of them need are built once into `--bundles`.
"""

from __future__ import annotations

import argparse
from importlib import import_module

from benchmarks.report import add_arguments, publish

NAMES = ("scheduling", "inprocess", "transports", "offload", "int8", "push", "codec", "idle", "start")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    add_arguments(parser)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    chosen = arguments.names or NAMES
    publish([(name, import_module(f"benchmarks.{name}").run) for name in chosen], arguments)


if __name__ == "__main__":
    main()
