"""`python -m tests.power [--images 500] [--seed N] [--mutations] [--slabs 10000]`: the power goes while an agent works.

The agent's lives are recorded call by call; a crash image of any moment keeps what was synced by then and any part of
the rest. `--mutations`: instead, each sync is left out in turn, and what shows that it is missed; those that nothing
misses have to be the ones that are known to be harmless. `--slabs`: what syncing costs where there are many of them.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.power.check import sample
from tests.power.log import build
from tests.power.record import SCENARIOS, Recording, on_disk, recorder, relaxed, same
from tests.power.small import installs
from tests.power.syncs import HARMLESS, each

_MEMORY = Path("/dev/shm")  # a private folder is made in it


def main() -> int:
    args = _arguments()
    print(f"seed {args.seed}", flush=True)
    started = time.monotonic()
    home = _MEMORY if _MEMORY.is_dir() and not args.slabs else None  # what syncing costs is a matter of a real disk
    with tempfile.TemporaryDirectory(prefix="outrider-power-", dir=home) as name:
        folder = Path(name)
        library = build(folder)
        if library is None:
            print("power: skipped, there is no C compiler here")
            return 0
        if args.slabs:
            problems, says = _slabs(folder, library, args.slabs)
        elif args.mutations:
            problems, says = _mutations(folder, library, args.images, args.seed)
        else:
            problems, says = _images(folder, library, args.images, args.seed)
    for problem in problems[:20]:
        print(problem)
    print(f"power: {says}, {len(problems)} problems in {time.monotonic() - started:.0f} s")
    return 1 if problems else 0


@contextmanager
def _recordings(folder: Path, library: Path) -> Iterator[list[Recording]]:
    with ExitStack() as stack:
        found = []
        for scenario in SCENARIOS:
            one = stack.enter_context(recorder(folder / scenario.__name__, library))
            scenario(one)
            found.append(one.recording())
        yield found


def _images(folder: Path, library: Path, count: int, seed: int) -> tuple[list[str], str]:
    images, kept, problems = 0, 0, list[str]()
    with _recordings(folder, library) as recordings:
        for number, one in enumerate(recordings):
            problems += [
                f"{name}: the log does not give what is on the disk" for name in same(one.whole(), on_disk(one))
            ]
            share = count // len(recordings) + (number < count % len(recordings))
            outcome = sample(one, count=share, seed=seed + number)
            images, kept, problems = images + outcome.images, kept + outcome.kept, problems + outcome.problems
        calls = sum(len(one.entries) for one in recordings)
    return problems, f"{images} images of {calls} calls, {kept} committed versions that had to be there"


def _mutations(folder: Path, library: Path, count: int, seed: int) -> tuple[list[str], str]:
    problems, missed = [], 0
    with _recordings(folder, library) as recordings:
        print(f"{'without':52}{'calls':>6}{'images':>8}  what it led to")
        for one in each(recordings, count=count, seed=seed):
            shown = one.outcome.problems
            missed += bool(shown)
            why = shown[0].partition("): ")[2] if shown else f"nothing: {HARMLESS.get(one.name, '?')}"
            print(f"{one.name:52}{one.calls:6}{one.outcome.images:8}  {why}", flush=True)
            if bool(shown) == (one.name in HARMLESS):
                problems.append(f"{one.name}: {'missed after all' if shown else 'not missed'}")
    with recorder(folder / "relaxed", library) as writes:
        relaxed(writes)
        outcome = sample(writes.recording(), count=count, seed=seed)
        print(f"synchronous=NORMAL, in the agent itself: {len(outcome.problems)} problems in {outcome.images} images")
        problems += [] if outcome.problems else ["synchronous=NORMAL: not missed"]
    return problems, f"{missed} syncs that are missed, {len(HARMLESS)} that are not"


def _slabs(folder: Path, library: Path, count: int) -> tuple[list[str], str]:
    with recorder(folder / "slabs", library) as writes:
        few, many = installs(writes, 10, count)
    for one in (few, many):
        files = one.syncs - one.journal
        print(
            f"{one.slabs} slabs: {files} syncs of files and folders, {one.journal} of the journal, "
            f"{one.sync_s * 1000:.0f} ms of {one.seconds * 1000:.0f} ms"
        )
    is_same = few.syncs - few.journal == many.syncs - many.journal
    problems = [] if is_same and many.sync_s < many.seconds / 2 else ["the syncs grow with the slabs"]
    return problems, f"{many.slabs} slabs, {100 * many.sync_s / many.seconds:.1f} % of the time in syncs"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.power", description=__doc__)
    parser.add_argument("--images", type=int, default=500, help="crash images; of each mutation, at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31), help="(random; printed)")
    parser.add_argument("--mutations", action="store_true", help="leave out each sync in turn")
    parser.add_argument("--slabs", type=int, default=0, help="install a release of so many small slabs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
