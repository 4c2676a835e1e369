"""`python -m tests.soak.updates [--updates 50]`: update after update on a whole node, each served, its disk bounded.

Every version is a real model whose answer tells its number. Asserted: each release answers, with its own answer, and
what the node keeps on its disk after each is within two versions and the journal's share.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.soak.one_node import LINEAR, X, answer_of, one_node
from tests.soak.result import Result

KEPT = 2  # versions: the active one and the one before
SHARE_BYTES = 1 << 20  # of everything else: journal, metadata, what is being fetched


async def run(folder: Path, *, updates: int, probation_s: float = 0.2) -> Result:
    problems: list[str] = []
    seconds: list[float] = []
    most = 0
    with one_node(folder, sync={"probation_s": probation_s}) as (releases, node):
        async with node.client() as client:
            await node.until_serves(client, LINEAR, "1")
            version_bytes = max(map(_bytes, (node.state / "sync" / "models" / LINEAR).iterdir()))
            limit = KEPT * version_bytes + SHARE_BYTES
            for number in range(2, updates + 2):
                version = await asyncio.to_thread(releases.release)
                started = time.monotonic()
                try:
                    await node.until_serves(client, LINEAR, version)
                except TimeoutError as exc:
                    problems.append(f"update {number}: {exc}")
                    break
                seconds.append(time.monotonic() - started)
                answer = await client.infer(LINEAR, {"x": X}, timeout_s=5.0)
                if not np.allclose(answer.outputs["logits"], answer_of(answer.version), rtol=1e-5):
                    problems.append(f"version {answer.version} answers {answer.outputs['logits']}")
                await asyncio.sleep(2 * probation_s)  # what is cleared away, is after it
                used = _bytes(node.state)
                most = max(most, used)
                kept = sum(1 for _ in (node.state / "sync" / "models" / LINEAR).iterdir())
                if used > limit or kept > KEPT:
                    problems.append(f"after update {number}: {kept} versions, {used:,} bytes, over {limit:,}")
    usual = 1000 * statistics.median(seconds) if seconds else 0.0
    says = (
        f"{len(seconds)} of {updates} updates served, {usual:.0f} ms each (median); at most {most:,} bytes on its disk"
    )
    figures = {"updates": len(seconds), "served_ms": round(usual), "most_bytes": most}
    return Result(part="updates", says=says, problems=problems, figures=figures)


def _bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
        except FileNotFoundError:  # cleared away meanwhile
            continue
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.updates", description=__doc__)
    parser.add_argument("--updates", type=int, default=50, help="(%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outrider-updates-") as folder:
        result = asyncio.run(run(Path(folder), updates=args.updates))
    print(result.line())
    print(f"updates: {result.says}")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
