"""`python -m tests.soak [PART ...]`, or `make soak`: the long checks, one after another, each with its result line.

Every part starts what it needs and ends it. The last line is one JSON object; the exit code is 1 when anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from tests.soak import clock, cuts, growth, kills, reconnects
from tests.soak.pushes import say
from tests.soak.result import Result
from tests.system.running import Up

PARTS = (
    *("kills", "growth", "fuzz", "schema", "clock", "agent", "power", "cuts", "reconnects"),
    *("node_kills", "disk_full", "updates", "swaps", "broker"),
)
_TAIL = 40  # lines shown again where a part failed


def main() -> int:
    args = _arguments()
    results = []
    started = time.monotonic()
    folder = args.state or Path(tempfile.mkdtemp(prefix="outrider-soak-"))
    print(f"seed {args.seed}; states and logs in {folder}", flush=True)
    try:
        for result in _all(args, folder):
            results.append(result)
            print(result.line(), flush=True)
    except Exception:  # a system that does not start, a library that breaks: a fault like any other
        results.append(Result(part="soak", says="broke off", problems=traceback.format_exc().splitlines()[-_TAIL:]))
        print(results[-1].line(), flush=True)
    passed = all(result.passed for result in results)
    if passed and not args.state:
        shutil.rmtree(folder)
    said = {
        "passed": passed,
        "seed": args.seed,
        "seconds": round(time.monotonic() - started, 1),
        "parts": [result.as_json() for result in results],
    }
    print(json.dumps(said), flush=True)
    return 0 if passed else 1


def _all(args: argparse.Namespace, folder: Path) -> Iterator[Result]:
    """Each result as it comes. Kills and growth share a system; the others have their own."""
    parts = args.parts or PARTS
    bundles = args.bundles or folder / "bundles"
    rate: float = args.rate
    if set(parts) & {"kills", "growth"}:
        up = Up(folder / "state", bundles)
        up.start()
        try:
            if not rate:
                sustained, result = asyncio.run(kills.run_measure(up))
                rate = kills.SHARE * sustained
                yield result
            if rate:
                yield from _on_one_system(args, up, rate, parts)
        except BaseException:
            up.process.terminate()
            up.process.wait(60)
            raise
        yield kills.run_shutdown(up)
    if "fuzz" in parts:
        yield _module("fuzz", "--inputs", args.inputs, "--seed", args.seed)
    if "schema" in parts:
        yield _module("schema", "--examples", args.examples, "--seed", args.seed)
    if "agent" in parts:
        yield _module("agent_kills", "--kills", args.agent_kills, "--seed", args.seed)
    if "power" in parts:
        yield _module("power", "--images", args.images, "--seed", args.seed, package="tests")
    if "cuts" in parts:
        yield cuts.run()
    if "reconnects" in parts:
        yield reconnects.run()
    if "node_kills" in parts:
        yield _module("node_kills", "--kills", args.node_kills, "--seed", args.seed)
    if "disk_full" in parts:
        yield _module("disk_full", "--seed", args.seed)
    for name, count in (("updates", args.updates), ("swaps", args.swaps), ("broker", args.broker_kills)):
        if name in parts:
            yield _module(name, f"--{'kills' if name == 'broker' else name}", count)
    if "clock" in parts:
        minutes = args.clock_minutes or args.minutes / 5
        yield clock.run(folder / "clock", bundles, rate=rate or 50.0, minutes=minutes, seed=args.seed)


def _on_one_system(args: argparse.Namespace, up: Up, rate: float, parts: tuple[str, ...]) -> Iterator[Result]:
    if "kills" in parts:
        yield asyncio.run(
            kills.run(
                up,
                rate=rate,
                minutes=args.minutes,
                seed=args.seed,
                kill_every_s=args.kill_every_s,
                push_every_s=args.push_every_s,
            )
        )
    if "growth" in parts:
        yield asyncio.run(
            growth.run(up, rate=rate, minutes=args.minutes, seed=args.seed, push_every_s=args.push_every_s)
        )


def _module(name: str, *flags: object, package: str = "tests.soak") -> Result:
    """Runs one of the parts that are commands of their own; their lines are shown as they come."""
    started, lines = time.monotonic(), deque[str](maxlen=_TAIL)
    command = (sys.executable, "-m", f"{package}.{name}", *map(str, flags))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            say(line.rstrip())
            lines.append(line.rstrip())
    said = next((line for line in reversed(lines) if line), "").rpartition(f"{name}: ")[2]
    problems = [] if child.returncode == 0 else [f"ended with {child.returncode}:", *lines]
    figures = {"said": said, "seconds": round(time.monotonic() - started, 1)}
    return Result(part=name, says=said, problems=problems, figures=figures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="(default: all of them, in this order)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of kills, and of growth (%(default)s)")
    parser.add_argument("--clock-minutes", type=float, default=0.0, help="(default: a fifth of --minutes)")
    parser.add_argument("--inputs", type=int, default=100_000, help="of the fuzz run (%(default)s)")
    parser.add_argument("--examples", type=int, default=200, help="per operation, of the schema run (%(default)s)")
    parser.add_argument("--agent-kills", type=int, default=2000, help="of an agent alone (%(default)s)")
    parser.add_argument("--node-kills", type=int, default=100, help="of a whole node under load (%(default)s)")
    parser.add_argument("--updates", type=int, default=50, help="one after another on a node (%(default)s)")
    parser.add_argument("--swaps", type=int, default=1000, help="under 200 calls/s (%(default)s)")
    parser.add_argument("--broker-kills", type=int, default=50, help="of the MQTT broker (%(default)s)")
    parser.add_argument("--images", type=int, default=500, help="of a disk after a power loss (%(default)s)")
    parser.add_argument("--rate", type=float, default=0.0, help="calls/s; 0: 60 %% of what is measured first")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31), help="(random; printed)")
    parser.add_argument("--kill-every-s", type=float, default=kills.KILL_EVERY_S, help="(%(default)s)")
    parser.add_argument("--push-every-s", type=float, default=kills.PUSH_EVERY_S, help="(%(default)s)")
    parser.add_argument("--state", type=Path, help="folder for states and logs (default: kept after a failure only)")
    parser.add_argument("--bundles", type=Path, help="as of `outrider up`: kept between runs (default: built anew)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
