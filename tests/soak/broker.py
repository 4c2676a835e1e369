"""`python -m tests.soak.broker [--kills 50]`: the broker of hints is killed -9 again and again.

Agents, a sync service with its publisher, and `outrider sync broker`, each a process or thread of its own. Asserted:
what is released while the broker is dead reaches every agent by its next poll; once the broker is back, hints are
heeded again, by agents and service alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sync.agent.links import LinkInstaller
from sync.agent.running import SyncOptions, running_agent
from tests.soak.one_node import LINEAR, START_S, Releases, bound
from tests.soak.result import Result

AGENTS, INTERVAL_S = 3, 3.0
SLACK_S = 3.0  # of a poll's interval: fetching, verifying, a busy machine
HINTED = 0.25  # of the interval; all of them so soon: that was a hint
BACK_S = 60.0  # until hints are heeded again, at most
_ROW = 3  # releases in a row that have to come by hint


class Broker:
    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._log = log

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(bound("sync", "broker", "--port", self.port), stdout=log, stderr=log)
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.05)
        raise TimeoutError(f"the broker does not listen:\n{self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


async def run(folder: Path, *, kills: int, interval_s: float = INTERVAL_S) -> Result:
    broker = Broker(folder / "broker.log")
    broker.start()
    polled: list[float] = []
    problems: list[str] = []
    hinted = back_s = 0.0
    try:
        with Releases(folder / "world", broker=broker.address) as releases:
            releases.release()
            async with contextlib.AsyncExitStack() as stack:
                nodes = [folder / f"node-{number}" for number in range(AGENTS)]
                for node in nodes:
                    await stack.enter_async_context(_agent(node, releases, broker.address, interval_s))
                for number in range(kills):
                    broker.kill()
                    seconds = await _released(releases, nodes)
                    if seconds > 1.1 * interval_s + SLACK_S:
                        problems.append(f"kill {number + 1}: not everywhere {seconds:.1f} s after the release")
                    polled.append(seconds)
                    await asyncio.to_thread(broker.start)
                started, in_a_row = time.monotonic(), 0
                while in_a_row < _ROW and time.monotonic() - started < BACK_S:
                    hinted = await _released(releases, nodes)
                    in_a_row = in_a_row + 1 if hinted < HINTED * interval_s else 0
                back_s = time.monotonic() - started
                if in_a_row < _ROW:
                    problems.append(f"hints are not heeded {BACK_S:g} s after the last kill")
    finally:
        broker.kill()
    says = (
        f"{len(polled)} kills of the broker, {AGENTS} agents that poll each {interval_s:g} s: what was released "
        f"meanwhile was everywhere after {statistics.median(polled):.1f} s (median), {max(polled):.1f} s at most; "
        f"with hints again {1000 * hinted:.0f} ms, {back_s:.1f} s after the last one"
    )
    figures = {"kills": len(polled), "polled_s": round(statistics.median(polled), 2), "hinted_s": round(hinted, 3)}
    return Result(part="broker", says=says, problems=problems, figures=figures)


def _agent(
    node: Path, releases: Releases, broker: str, interval_s: float
) -> contextlib.AbstractAsyncContextManager[object]:
    options = SyncOptions(
        source=releases.address,
        root=releases.root,
        broker=broker,
        interval_s=interval_s,
        min_gap_s=0.05,
        probation_s=0.0,
    )
    installer = LinkInstaller(node / "current", ("cpu-int8",))
    return running_agent(options, node, installer, name=node.name, engines=("onnxruntime",))


async def _released(releases: Releases, nodes: list[Path]) -> float:
    """Seconds from a new release until every node has it."""
    version = await asyncio.to_thread(releases.release)
    started = time.monotonic()
    await _until(lambda: all((node / "current" / LINEAR).resolve().name == version for node in nodes))
    return time.monotonic() - started


async def _until(is_so: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not is_so():
            await asyncio.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.broker", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="(%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outrider-broker-") as folder:
        result = asyncio.run(run(Path(folder), kills=args.kills))
    print(result.line())
    print(f"broker: {result.says}")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
