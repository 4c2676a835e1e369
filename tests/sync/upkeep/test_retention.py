from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sync.upkeep.retention import MIN_KEPT, Candidate, Pack, plan


def release(rank: int, *slabs: str, model: str = "m", own: int = 10) -> Candidate:
    """Of content "d<rank>"; its version falls as the rank rises."""
    return Candidate(
        model=model, version=100 - rank, rank=rank, digest=f"{model}{rank}", slabs=frozenset(slabs), own_bytes=own
    )


RELEASES = [release(0, "a", "b"), release(1, "a", "c"), release(2, "a", "d"), release(3, "e")]
OBJECTS = {"a": 100, "b": 200, "c": 300, "d": 400, "e": 500, "z": 9000}
PACKS: dict[Pack, int] = {
    ("m0", "m1"): 1,
    ("m0", "m2"): 2,
    ("m1", "m2"): 4,
    ("m2", "m3"): 8,
    ("m3", "m4"): 16,
}
ALL = 4 * 10 + 1500 + 15  # manifests, objects a to e, packs between kept releases


def planned(quota: int | None) -> tuple[set[int], set[Pack], set[str]]:
    made = plan(RELEASES, OBJECTS, PACKS, other_bytes=7, quota_bytes=quota)
    return {one.rank for one in made.releases}, set(made.packs), set(made.slabs)


def test_without_a_quota_everything_that_kept_releases_name_stays() -> None:
    assert planned(None) == ({0, 1, 2, 3}, set(PACKS) - {("m3", "m4")}, set("abcde"))


def test_a_quota_takes_packs_from_the_oldest_base_first() -> None:
    assert planned(7 + ALL) == planned(None)
    assert planned(7 + ALL - 1)[1] == {("m0", "m1"), ("m0", "m2"), ("m1", "m2")}
    assert planned(7 + ALL - 8)[1] == {("m0", "m1"), ("m0", "m2"), ("m1", "m2")}
    assert planned(7 + ALL - 9)[1] == {("m0", "m1"), ("m0", "m2")}
    assert planned(7 + ALL - 15) == ({0, 1, 2, 3}, set(), set("abcde"))


def test_then_the_oldest_releases_down_to_two() -> None:
    without_packs = 7 + ALL - 15
    assert planned(without_packs - 1) == ({0, 1, 2}, set(), set("abcd"))
    assert planned(without_packs - 510) == ({0, 1, 2}, set(), set("abcd"))
    assert planned(without_packs - 511) == ({0, 1}, set(), set("abc"))
    assert planned(0) == ({0, 1}, set(), set("abc"))


def test_the_oldest_of_any_model_goes_first() -> None:
    found = [release(2, "x"), release(2, "y", model="n"), release(3, "z", model="n")]
    made = plan(found, {"x": 1, "y": 1, "z": 1}, {}, other_bytes=0, quota_bytes=22)
    assert [(one.model, one.rank) for one in made.releases] == [("m", 2), ("n", 2)]


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(st.frozensets(st.sampled_from("abcdefgh"), min_size=1), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 50), min_size=8, max_size=8),
    quota=st.integers(0, 400),
)
def test_a_quota_is_met_or_nothing_more_could_go(contents: list[frozenset[str]], sizes: list[int], quota: int) -> None:
    found = [release(rank, *slabs, own=3) for rank, slabs in enumerate(contents)]
    objects = dict(zip("abcdefgh", sizes, strict=True))
    packs = {(f"m{rank}", f"m{rank + 1}"): 5 for rank in range(len(contents) - 1)}
    made = plan(found, objects, packs, other_bytes=0, quota_bytes=quota)
    assert made.slabs == frozenset().union(*(one.slabs for one in made.releases))
    left = 3 * len(made.releases) + 5 * len(made.packs) + sum(objects[slab] for slab in made.slabs)
    is_least = not made.packs and len(made.releases) == min(len(contents), MIN_KEPT)
    assert left <= quota or is_least
    assert [one.rank for one in made.releases] == list(range(len(made.releases)))
