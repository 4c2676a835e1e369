"""Which releases, packs and objects of a store are kept: rules only.

Kept of each model: what is desired, and the newest releases of other content. A quota takes packs first (a node then
takes whole slabs), those from the oldest base before the others, then the oldest releases; never the two newest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

MIN_KEPT: Final = 2  # contents of each model: what nodes should serve, and what they come from

Pack = tuple[str, str]  # digests: to, from


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A release that may be kept. `rank`: 0 is desired, 1 the newest of other content, and so on."""

    model: str
    version: int
    rank: int
    digest: str
    slabs: frozenset[str]
    own_bytes: int  # of its manifest and what lies beside that


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    releases: tuple[Candidate, ...]
    packs: frozenset[Pack]
    slabs: frozenset[str]


def plan(
    candidates: Sequence[Candidate],
    objects: Mapping[str, int],
    packs: Mapping[Pack, int],
    *,
    other_bytes: int,
    quota_bytes: int | None,
) -> Plan:
    """`objects` and `packs`: what is in the store, with their bytes. `other_bytes`: what stays in any case."""
    kept = list(candidates)
    left = _between(kept, packs)
    uses = Counter(slab for one in kept for slab in one.slabs)
    total = other_bytes + sum(one.own_bytes for one in kept) + sum(packs[one] for one in left)
    total += sum(objects.get(slab, 0) for slab in uses)
    most = total if quota_bytes is None else quota_bytes
    ranks = _ranks(kept)
    for pack in sorted(left, key=lambda one: (-ranks[one[1]], -ranks[one[0]], one)):
        if total <= most:
            break
        left.remove(pack)
        total -= packs[pack]
    for release in sorted(kept, key=lambda one: (-one.rank, one.version, one.model)):
        if total <= most or release.rank < MIN_KEPT:
            break
        kept.remove(release)
        uses.subtract(release.slabs)
        total -= release.own_bytes + sum(objects.get(slab, 0) for slab in release.slabs if not uses[slab])
    return Plan(
        releases=tuple(kept),
        packs=frozenset(left),
        slabs=frozenset(slab for slab, count in uses.items() if count),
    )


def _between(kept: Iterable[Candidate], packs: Iterable[Pack]) -> set[Pack]:
    """Packs with both ends among the releases that are kept."""
    digests = {one.digest for one in kept}
    return {(target, base) for target, base in packs if target in digests and base in digests}


def _ranks(kept: Iterable[Candidate]) -> dict[str, int]:
    """By content: how new it is."""
    found: dict[str, int] = {}
    for one in kept:
        found[one.digest] = min(one.rank, found.get(one.digest, one.rank))
    return found
