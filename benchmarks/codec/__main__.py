"""`python -m benchmarks.codec --checkpoints DIR`: the codec's benchmark with all that it can be asked for."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from benchmarks.codec import compare, peers
from benchmarks.codec.compare import Options
from benchmarks.report import add_arguments, publish


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.codec",
        description=compare.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument(
        "--checkpoints", type=Path, metavar="DIR", help="with base, step100, step101, step150.safetensors"
    )
    parser.add_argument("--pair", action="append", default=[], metavar="NAME", help="this pair alone (repeatable)")
    parser.add_argument(
        "--billion", action="store_true", help="memory at a thousand million parameters too (8 GB of disk)"
    )
    parser.add_argument("--sizes-only", action="store_true", help="no speeds, no memory")
    arguments = parser.parse_args()
    peers.install()
    options = Options(
        checkpoints=arguments.checkpoints,
        packages=peers.PACKAGES,
        names=tuple(arguments.pair),
        with_billion=arguments.billion,
        with_speeds=not arguments.sizes_only,
    )
    publish([("codec", partial(compare.run, options=options))], arguments)


if __name__ == "__main__":
    main()
