"""`python -m tests.fuzz TARGET RUNS`: one target, under atheris where it can be imported, else the own mutator.

Stops by itself after RUNS inputs, or at the first finding, which it leaves in build/fuzz/.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.fuzz import mutate

FOUND = Path("build/fuzz")
SECONDS = 2.0  # for one input


def main() -> None:
    name, runs = sys.argv[1], int(sys.argv[2])
    FOUND.mkdir(parents=True, exist_ok=True)
    try:
        import atheris
    except ImportError:
        print(f"{name}: {runs} inputs from the project's own mutator (no atheris here)", flush=True)
        with_mutator(name, runs)
        return
    print(f"{name}: {runs} inputs from atheris", flush=True)
    with atheris.instrument_imports(include=["sync"]):
        from tests.fuzz.targets import CORPUS, TARGETS
    new = FOUND / f"{name}-found"
    new.mkdir(exist_ok=True)
    limits = [f"-runs={runs}", "-max_len=8192", f"-timeout={SECONDS:.0f}", "-rss_limit_mb=2048"]
    output = [f"-artifact_prefix={FOUND}/{name}-", "-print_final_stats=1", "-verbosity=1"]
    atheris.Setup([sys.argv[0], *limits, *output, str(new), str(CORPUS / name)], TARGETS[name])
    atheris.Fuzz()


def with_mutator(name: str, runs: int) -> None:
    from tests.fuzz.targets import CORPUS, TARGETS

    seeds = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    began = time.monotonic()
    for index in range(runs):
        data = mutate.make(seeds, 1, index)
        start = time.monotonic()
        try:
            TARGETS[name](data)
            if time.monotonic() - start > SECONDS:
                raise TimeoutError(f"more than {SECONDS} s")
        except Exception:
            (FOUND / f"{name}-crash-{index}").write_bytes(data)
            raise
    print(f"{name}: {runs} inputs in {time.monotonic() - began:.0f} s, nothing found")


if __name__ == "__main__":
    main()
