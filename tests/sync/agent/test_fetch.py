from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import BadRelease, FetchError
from sync.agent.fetch import BATCH_BYTES, Assembly, Fetched, LocalSlabs, verify_files
from sync.agent.journal import Release
from sync.agent.ports import Want
from tests.sync.fakes import StoreSource, World, trained, weights


class Counting(StoreSource):
    """Remembers the size of each call."""

    calls: list[list[Want]]

    def fetch(self, wants: Sequence[Want]) -> Iterator[tuple[str, bytes]]:
        self.calls = [*getattr(self, "calls", []), list(wants)]
        return super().fetch(wants)


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
    assert all(sum(want.length for want in call) <= BATCH_BYTES for call in source.calls)


def test_bases_are_offered_in_every_version_on_the_disk(world: World, tmp_path: Path) -> None:
    versions = [weights(), trained(weights(), "fc.weight", seed=1), trained(weights(), "fc.weight", seed=2)]
    for version in versions:
        world.publish(version)
    known = [(release(world, number), tmp_path / number) for number in ("1", "2")]
    for one, folder in known:
        assemble(world, one, folder)
    world.source.fetched.clear()
    result = assemble(world, release(world, "3"), tmp_path / "3", *known)
    (want,) = world.source.fetched
    assert len(want.bases) == 2
    assert set(result.bytes_by_form) == {"planes"}


def test_files_of_an_earlier_try_do_not_stay(world: World, tmp_path: Path) -> None:
    world.publish(weights())
    assemble(world, release(world, variant="cpu-int8"), tmp_path / "out")
    assemble(world, release(world, variant="full"), tmp_path / "out")
    assert not (tmp_path / "out/cpu-int8/model.safetensors").exists()


def test_an_answer_that_stops_early_is_an_error_and_keeps_what_came(world: World, tmp_path: Path) -> None:
    class Short(StoreSource):
        def fetch(self, wants: Sequence[Want]) -> Iterator[tuple[str, bytes]]:
            return super().fetch(wants[:2])

    world.publish(weights())
    source = Short(world.store)
    for _ in range(2):  # the second try starts after what the first one brought
        with pytest.raises(FetchError, match="ended early"):
            assemble(world, release(world), tmp_path / "out", source=source)
    assert len({want.id for want in source.fetched}) == 4


def test_a_manifest_whose_slabs_do_not_give_the_file_is_a_bad_release(world: World, tmp_path: Path) -> None:
    world.publish(weights())
    good = release(world)
    files = tuple(replace(file, digest="00" * 32) for file in good.manifest.files)
    bad = replace(good, manifest=replace(good.manifest, files=files))
    with pytest.raises(BadRelease, match="do not give the hash"):
        assemble(world, bad, tmp_path / "out")


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
