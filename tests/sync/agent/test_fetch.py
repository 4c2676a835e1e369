from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.bundle import Variant
from common.errors import BadRelease, FetchError
from sync.agent.download import Answer
from sync.agent.fetch import Assembly, Fetched
from sync.agent.journal import Release
from sync.agent.local import LocalSlabs, verify_files
from sync.agent.offers import FIRST_RATE, Link
from sync.agent.ports import Range
from sync.agent.ranges import joined
from sync.agent.wants import BATCH_BYTES
from sync.codec import encode_full, kernels
from sync.packs import parse_index
from sync.release import FileEntry, Manifest, SlabEntry
from sync.slabs import SLAB_BYTES, slab_id
from sync.store import index_name, pack_name
from tests.sync.fakes import StoreSource, World, trained, weights
from tests.sync.indexes import entries_of, with_entries


class Counting(StoreSource):
    """Remembers what each call asked for."""

    calls: list[list[Range]]

    def fetch(self, ranges: Sequence[Range]) -> Iterator[bytes | None]:
        self.calls = [*getattr(self, "calls", []), list(ranges)]
        return super().fetch(ranges)


def release(world: World, version: str = "1", variant: str = "full") -> Release:
    manifest = world.publisher.manifest("digits", version)
    assert manifest is not None
    return Release(manifest=manifest, variant=variant, engine="onnxruntime")


def assemble(world: World, one: Release, folder: Path, *known: tuple[Release, Path], **options: object) -> Fetched:
    folder.mkdir(exist_ok=True)
    result = Fetched()
    Assembly(one, folder, LocalSlabs(known)).run(options.get("source", world.source), result)  # type: ignore[arg-type]
    return result


def test_what_was_assembled_is_what_was_published(world: World, tmp_path: Path) -> None:
    world.publish(weights())
    one, folder = release(world), tmp_path / "out"
    result = assemble(world, one, folder)
    assert verify_files(one, folder) is None
    assert result.fetched == len(one.manifest.slabs(one.paths())) - 1  # a fresh file holds the golden set's zeros
    for path in one.paths():
        assert (folder / path).read_bytes() == (world.folder / "bundle" / path).read_bytes()


def test_calls_are_bounded(world: World, tmp_path: Path) -> None:
    world.publish({"w": weights(rows=12_000)["fc.weight"]})
    source = Counting(world.store)
    assemble(world, release(world), tmp_path / "out", source=source)
    assert len(source.calls) > 2
    assert all(sum(one.limit > SLAB_BYTES for one in call) * SLAB_BYTES <= BATCH_BYTES for call in source.calls)


Known = list[tuple[Release, Path]]


def installed(world: World, tmp_path: Path, *versions: str) -> Known:
    """These versions as a node has them on its disk."""
    known = [(release(world, number), tmp_path / number) for number in versions]
    for one, folder in known:
        assemble(world, one, folder)
    world.source.fetched.clear()
    world.source.indexes.clear()
    return known


def three(world: World) -> None:
    """Versions 1 to 3: each differs in two large tensors."""
    current = weights()
    for seed in range(3):
        world.publish(current)
        current = trained(current, "conv.weight", "fc.weight", seed=seed)


def packs(world: World, target: str = "3") -> list[Path]:
    return sorted(world.store.root.glob(f"packs/{release(world, target).manifest.digest()}/*.pack"))


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("held", [("2",), ("1",), ("1", "2")])
def test_the_pack_from_a_release_on_the_disk_is_used(world: World, tmp_path: Path, held: tuple[str, ...]) -> None:
    """From the newest, and from that alone, where it helps with every slab."""
    three(world)
    known = installed(world, tmp_path, *held)
    result = assemble(world, release(world, "3"), tmp_path / "out", *known)
    assert "full" not in result.bytes_by_form
    assert (result.fetched, result.fallbacks) == (2, 0)
    target, base = release(world, "3").manifest.digest(), release(world, max(held)).manifest.digest()
    assert world.source.indexes == [index_name(target, base)]
    assert {one.name for one in world.source.fetched} == {pack_name(target, base)}
    assert verify_files(release(world, "3"), tmp_path / "out") is None


def test_an_older_base_helps_where_the_newer_pack_is_gone(world: World, tmp_path: Path) -> None:
    three(world)
    known = installed(world, tmp_path, "1", "2")
    digests = [release(world, version).manifest.digest() for version in ("3", "2", "1")]
    world.store.drop_pack(digests[0], digests[1])
    result = assemble(world, release(world, "3"), tmp_path / "out", *known)
    assert world.source.indexes == [index_name(digests[0], base) for base in digests[1:]]
    assert "full" not in result.bytes_by_form


def test_counted_is_what_was_received(world: World, tmp_path: Path) -> None:
    three(world)
    known = installed(world, tmp_path, "2")
    result = assemble(world, release(world, "3"), tmp_path / "out", *known)
    (base,) = {Path(name).stem for name in world.source.indexes}
    index = world.store.index(release(world, "3").manifest.digest(), base) or b""
    assert result.bytes_by_form["index"] == len(index)
    payloads = {form: size for form, size in result.bytes_by_form.items() if form != "index"}
    assert sum(payloads.values()) == sum(one.length for one in world.source.fetched)


def test_a_damaged_payload_costs_the_full_of_that_slab_alone(world: World, tmp_path: Path) -> None:
    three(world)
    known = installed(world, tmp_path, "2")
    for path in packs(world):
        damage(path, -1)  # the last first form, or a second one that nobody takes
    one = release(world, "3")
    first = assemble(world, one, tmp_path / "out", *known)
    assert verify_files(one, tmp_path / "out") is None
    fulls = [each.name for each in world.source.fetched if each.name.endswith(".full")]
    assert first.fetched == 2
    assert len(fulls) == first.fallbacks <= 1
    for path in packs(world):  # and all of them
        path.write_bytes(bytes(path.stat().st_size))
    world.source.fetched.clear()
    second = assemble(world, one, tmp_path / "again", *known)
    assert verify_files(one, tmp_path / "again") is None
    assert second.fallbacks == len([each for each in world.source.fetched if each.name.endswith(".full")]) == 2


def test_a_pack_that_is_cut_short_or_gone_costs_fulls(world: World, tmp_path: Path) -> None:
    three(world)
    known, one = installed(world, tmp_path, "2"), release(world, "3")
    for path in packs(world):
        path.write_bytes(path.read_bytes()[:600])
    result = assemble(world, one, tmp_path / "short", *known)
    assert verify_files(one, tmp_path / "short") is None
    assert (result.fetched, result.fallbacks) == (2, 2)
    for path in packs(world):
        path.unlink()
    result = assemble(world, one, tmp_path / "gone", *known)
    assert verify_files(one, tmp_path / "gone") is None
    assert (result.fetched, result.fallbacks) == (2, 2)


@pytest.mark.parametrize("how", ["damaged", "later format", "of another pair", "too long", "missing"])
def test_without_a_sound_index_slabs_come_in_full(
    world: World, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    three(world)
    known, one = installed(world, tmp_path, "2"), release(world, "3")
    target, base = one.manifest.digest(), known[0][0].manifest.digest()
    path = world.store.root / index_name(target, base)
    if how == "damaged":
        damage(path, 100)
    elif how == "later format":
        damage(path, 5)
    elif how == "of another pair":
        other = world.store.root / index_name(base, release(world, "1").manifest.digest())
        path.write_bytes(other.read_bytes())
    elif how == "too long":
        path.write_bytes(path.read_bytes() + bytes(1 << 20))
    else:
        path.unlink()
    result = assemble(world, one, tmp_path / "out", *known)
    assert verify_files(one, tmp_path / "out") is None
    assert (result.fetched, result.fallbacks) == (2, 0)
    assert set(result.bytes_by_form) - {"index"} == {"full"}
    assert bool(caplog.records) == (how in ("damaged", "of another pair"))


def test_a_form_of_later_times_is_passed_over(world: World, tmp_path: Path) -> None:
    """The next entry of that slab is taken, and where there is none the full."""
    three(world)
    known, one = installed(world, tmp_path, "2"), release(world, "3")
    target, base = one.manifest.digest(), known[0][0].manifest.digest()
    old = world.store.index(target, base) or b""
    sets = int.from_bytes(old[6:8], "little")
    later = [entry[:16] + b"\x4d" + entry[17:] for entry in entries_of(old, sets)]
    world.store.put_index(target, base, with_entries(old, *later, sets=sets))
    result = assemble(world, one, tmp_path / "out", *known)
    assert verify_files(one, tmp_path / "out") is None
    assert set(result.bytes_by_form) == {"index", "full"}
    assert (result.fetched, result.fallbacks) == (2, 0)


def wide(world: World) -> Known:
    """Two versions whose pack has table sets; the first one is on the disk."""
    first = weights(rows=1000)
    world.publish(first)
    known = installed(world, world.folder, "1")
    world.publish(trained(first))
    return known


def table_ranges(world: World, known: Known) -> list[tuple[int, int]]:
    target, base = release(world, "2").manifest, known[0][0].manifest
    index = parse_index(world.store.index(target.digest(), base.digest()) or b"", base=base, target=target)
    assert index is not None
    return [(one.offset, one.length) for one in index.tables]


needs_kernels = pytest.mark.skipif(not kernels.HAVE_KERNELS, reason="without the kernels nothing is encoded as ctx")


@needs_kernels
def test_a_table_set_is_fetched_once_whatever_needs_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, source = wide(world), Counting(world.store)
    monkeypatch.setattr("sync.agent.wants.BATCH_BYTES", 1000)
    result = assemble(world, release(world, "2"), tmp_path / "out", *known, source=source)
    assert verify_files(release(world, "2"), tmp_path / "out") is None
    assert len([call for call in source.calls if any(one.length > 1000 for one in call)]) > 1
    ranges = table_ranges(world, known)
    tables = [one for one in source.fetched if (one.offset, one.length) in ranges]
    assert len(tables) == len(set(tables)) == 1  # the other one is for int8
    assert result.bytes_by_form["tables"] == tables[0].length


@needs_kernels
def test_payloads_of_one_call_follow_one_another(world: World, tmp_path: Path) -> None:
    known, source = wide(world), Counting(world.store)
    assemble(world, release(world, "2"), tmp_path / "out", *known, source=source)
    _, call = source.calls  # the index came first
    assert len(joined(call)) == 2 < len(call)  # a table set, and the payloads of this variant


@needs_kernels
def test_damaged_table_sets_cost_the_slabs_that_need_them(world: World, tmp_path: Path) -> None:
    known, one = wide(world), release(world, "2")
    (path,) = packs(world, "2")
    for offset, length in table_ranges(world, known):
        damage(path, offset + length - 1)
    result = assemble(world, one, tmp_path / "out", *known)
    assert verify_files(one, tmp_path / "out") is None
    assert result.fallbacks > 0
    assert result.bytes_by_form["full"] > 0


def test_a_fast_link_is_told_from_a_slow_one() -> None:
    link = Link()
    assert link.rate == FIRST_RATE
    for _ in link.timed(iter([Answer(data=bytes(8 << 20), received=8 << 20)])):
        pass
    assert link.rate > 4 * FIRST_RATE


def test_files_of_an_earlier_try_do_not_stay(world: World, tmp_path: Path) -> None:
    world.publish(weights())
    assemble(world, release(world, variant="cpu-int8"), tmp_path / "out")
    assemble(world, release(world, variant="full"), tmp_path / "out")
    assert not (tmp_path / "out/cpu-int8/model.safetensors").exists()


def test_an_answer_that_stops_early_is_an_error_and_keeps_what_came(world: World, tmp_path: Path) -> None:
    class Short(StoreSource):
        def fetch(self, ranges: Sequence[Range]) -> Iterator[bytes | None]:
            return super().fetch(ranges[:2])

    world.publish(weights())
    source = Short(world.store)
    for _ in range(2):  # the second try starts after what the first one brought
        with pytest.raises(FetchError, match="ended early"):
            assemble(world, release(world), tmp_path / "out", source=source)
    assert len({one.name for one in source.fetched}) == 4


def test_a_manifest_whose_slabs_do_not_give_the_file_is_a_bad_release(world: World, tmp_path: Path) -> None:
    world.publish(weights())
    good = release(world)
    files = tuple(replace(file, digest="00" * 32) for file in good.manifest.files)
    bad = replace(good, manifest=replace(good.manifest, files=files))
    with pytest.raises(BadRelease, match="do not give the hash"):
        assemble(world, bad, tmp_path / "out")


def test_small_slabs_do_not_cost_an_open_or_an_fsync_each(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, length = 200, 1000
    data = np.random.default_rng(0).bytes(many * length)
    slabs = []
    for at in range(0, len(data), length):
        one = encode_full(data[at : at + length], 1)
        world.store.put_full(one.header.slab, one.to_object())
        pieces = ((at, length),)
        slabs.append(SlabEntry(id=one.header.slab, key=f"t/w/{at}", width=1, mantissa=0, pieces=pieces))
    file = FileEntry(path="w", size=len(data), digest=slab_id(data), tensors=(), slabs=tuple(slabs))
    variant = Variant(name="v", files={"onnxruntime": ()})
    manifest = Manifest(model="m", version="1", parent=None, files=(file,), shared=("w",), variants=(variant,))
    opened, synced = list[object](), list[int]()
    open_ = os.open
    monkeypatch.setattr("os.open", lambda path, *rest, **more: opened.append(path) or open_(path, *rest, **more))
    monkeypatch.setattr("os.fsync", synced.append)
    known = Release(manifest=manifest, variant="v", engine="onnxruntime")
    assert assemble(world, known, tmp_path / "out").fetched == many
    assert assemble(world, known, tmp_path / "again", (known, tmp_path / "out")).reused == many
    assert len(synced) == 2 * 2  # the file and its folder
    assert len(opened) < 20


def test_damage_of_any_kind_is_seen(world: World, tmp_path: Path) -> None:
    world.publish(weights())
    one, folder = release(world), tmp_path / "out"
    assemble(world, one, folder)
    path = folder / "labels.txt"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"x", b"", bytes(len(whole))):
        path.write_bytes(damaged)
        assert "labels.txt" in (verify_files(one, folder) or "")
    os.unlink(path)
    assert "labels.txt" in (verify_files(one, folder) or "")
