"""A sample of `make fuzz` for the Python targets: the corpus, and a seeded few inputs made from it."""

from __future__ import annotations

import time

import pytest

from tests.fuzz import mutate
from tests.fuzz.targets import CORPUS, TARGETS

SECONDS = 0.25  # for each target


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_target_finds_nothing_in_its_corpus_and_in_a_seeded_sample(name: str) -> None:
    seeds = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    for data in seeds:
        TARGETS[name](data)
    end = time.monotonic() + SECONDS
    for index in range(500):
        TARGETS[name](mutate.make(seeds, 2, index))
        if time.monotonic() > end:
            break
