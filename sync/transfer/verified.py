"""What is signed in a place, as a node would see it: the same client, beginning at a root that is trusted already."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.clock import Clock
from common.errors import TrustError
from sync.store.stores import Readable
from sync.trust.chain import Chain, read_chain
from sync.trust.verifier import Read, Verifier, View

FIRST_ROOT = "metadata/1.root.json"


@contextlib.contextmanager
def verified(root: bytes, read: Read, clock: Clock) -> Iterator[View]:
    """Nothing of it is remembered. Raises as `Verifier.refresh` does."""
    with tempfile.TemporaryDirectory(prefix="outrider-transfer-") as folder:
        yield Verifier(Path(folder), root, read, clock).refresh()


def sound_chain(place: Readable, what: str) -> Chain:
    """Every signed file that counts, roles of other models included. Raises `TrustError` where one does not hold."""
    chain = read_chain(place)
    if chain.problems:
        raise TrustError(f"{what}: " + "; ".join(f"{name} {why}" for name, why in sorted(chain.problems.items())))
    return chain
