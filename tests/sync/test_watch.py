"""Which of a trainer's files are finished checkpoints, and how one is brought here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common.errors import CheckpointRefused, ConfigError
from sync.store.bucket import Bucket
from sync.watch.places import BucketPlace, FolderPlace, Place, place_of
from sync.watch.take import take
from sync.watch.watch import Checkpoint, Look, Seen, finished
from tests.sync.buckets import new_bucket, s3_server

PATTERN = "*.safetensors"


def look(*names: str, **sizes: int) -> dict[str, Seen]:
    """Files of 100 bytes, each written a second after the one before."""
    return {name: Seen(size=sizes.get(name, 100), changed=float(at)) for at, name in enumerate(names, 1)}


def chosen(now: Look, *, before: Look | None = None, **texts: str) -> str | None:
    found = finished(now if before is None else before, now, lambda name: texts[name.rpartition("/")[2]], PATTERN)
    return found[0].name if found else None


# --- rules ---


def test_the_newest_of_the_files_that_stand_still_is_chosen() -> None:
    now = look("a/1.safetensors", "b/2.safetensors", "optimizer.pt")
    assert chosen(now) == "b/2.safetensors"
    grown = {**now, "b/2.safetensors": Seen(size=101, changed=2.0)}
    assert chosen(grown, before=now) == "a/1.safetensors"
    touched = {**now, "b/2.safetensors": Seen(size=100, changed=2.5)}
    assert chosen(touched, before=now) == "a/1.safetensors"
    assert chosen(touched, before=touched) == "b/2.safetensors"


def test_a_file_that_was_seen_once_only_is_not_chosen() -> None:
    assert chosen(look("1.safetensors"), before={}) is None


def test_hidden_files_and_other_names_are_no_checkpoints() -> None:
    assert chosen(look(".tmp.safetensors", ".work/1.safetensors", "1.safetensors.part", "1.pt", "1-00001.npz")) is None


def test_once_a_trainer_marks_what_is_done_only_that_counts() -> None:
    names = ("1.safetensors", "two/model.safetensors", "three/model.safetensors")
    assert chosen(look(*names, "other.done")) is None
    assert chosen(look(*names, "1.safetensors.done")) == "1.safetensors"
    assert chosen(look(*names, "1.done")) == "1.safetensors"
    assert chosen(look(*names, "1.done", "two.done")) == "two/model.safetensors"


def test_latest_names_the_only_one_that_counts() -> None:
    now = look("latest", "step-1/model.safetensors", "step-2/model.safetensors")
    assert chosen(now, latest="step-1\n") == "step-1/model.safetensors"
    assert chosen(now, latest="step-2/model.safetensors") == "step-2/model.safetensors"
    assert chosen(now, latest="step") is None


SHARDS = ("c/m-00001-of-00002.safetensors", "c/m-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"}})


def test_a_checkpoint_in_several_files_counts_when_all_that_its_index_names_stand_still() -> None:
    name = "c/m.safetensors.index.json"
    texts = {"m.safetensors.index.json": INDEX}
    now = look("old.safetensors", name, *SHARDS)
    assert chosen(now, **texts) == name
    assert chosen(look("old.safetensors", name, SHARDS[0]), **texts) == "old.safetensors"
    assert chosen(look("old.safetensors", *SHARDS), **texts) == "old.safetensors"
    growing = {**now, SHARDS[1]: Seen(size=7, changed=9.0)}
    assert chosen(growing, before=now, **texts) == "old.safetensors"
    assert chosen({**growing, "late.safetensors": Seen(size=1, changed=8.0)}, before=growing, **texts) == name


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_an_index_that_cannot_be_understood_is_refused_by_name_and_hides_nothing(text: str, tmp_path: Path) -> None:
    now = look("1.safetensors", "m.safetensors.index.json")
    broken, other = finished(now, now, lambda name: text, PATTERN)
    assert other.name == "1.safetensors"
    with pytest.raises(CheckpointRefused, match=r"checkpoint m\.safetensors\.index\.json"):
        take(FolderPlace(tmp_path), now, broken, tmp_path / "checkpoint.safetensors")


# --- places ---


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(params=["folder", "bucket"])
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Place, Path]:
    """What is watched, and the folder that what a trainer writes is put into."""
    folder = tmp_path / "trainer"
    folder.mkdir()
    if request.param == "folder":
        return FolderPlace(folder), folder
    return Uploading(new_bucket(request.getfixturevalue("server")), folder), folder


class Uploading(BucketPlace):
    """Puts a folder into the bucket before each look."""

    def __init__(self, address: str, folder: Path) -> None:
        super().__init__(address)
        self._address, self._folder = address, folder

    def look(self) -> Look:
        bucket = Bucket(self._address, timeout_s=5)
        for path in self._folder.rglob("*"):
            if path.is_file():
                bucket.put(path.relative_to(self._folder).as_posix(), path.read_bytes())
        return super().look()


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(3, 5)).astype(np.float32), "b": rng.integers(0, 9, 7).astype(np.int8)}


def write(path: Path, content: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(content, path)


def only(name: str, seen: Look) -> Checkpoint:
    return Checkpoint(name=name, files=(name,), changed=seen[name].changed)


def test_a_checkpoint_is_brought_here_under_one_name(trainer: tuple[Place, Path], tmp_path: Path) -> None:
    place, folder = trainer
    write(folder / "step-1/model.safetensors", tensors(1))
    write(folder / "step-2/model.safetensors", tensors(2))
    seen = place.look()
    assert {one: seen[one].size for one in seen} == {
        f"step-{n}/model.safetensors": (folder / f"step-{n}/model.safetensors").stat().st_size for n in (1, 2)
    }
    to = tmp_path / "here/checkpoint.safetensors"
    digests = [take(place, seen, only(f"step-{n}/model.safetensors", seen), to) for n in (1, 2, 2)]
    assert digests[0] != digests[1] == digests[2]
    assert to.read_bytes() == (folder / "step-2/model.safetensors").read_bytes()
    assert list(to.parent.iterdir()) == [to]


def test_shards_become_one_file_with_the_same_tensors(trainer: tuple[Place, Path], tmp_path: Path) -> None:
    place, folder = trainer
    first, second = tensors(1), {"c": np.arange(5, dtype=np.float16), "d": np.ones((2, 2))}
    write(folder / SHARDS[0], first)
    write(folder / SHARDS[1], second)
    (folder / "c/m.safetensors.index.json").write_text(INDEX)
    seen = place.look()
    [found] = finished(seen, seen, place.text, PATTERN)
    to = tmp_path / "checkpoint.safetensors"
    take(place, seen, found, to)
    merged = load_file(to)
    assert set(merged) == {"a", "b", "c", "d"}
    for name, value in (first | second).items():
        np.testing.assert_array_equal(merged[name], value)
    write(folder / SHARDS[1], first)
    seen = place.look()
    with pytest.raises(CheckpointRefused, match="'a' in two files"):
        take(place, seen, found, to)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.99])
def test_a_half_written_file_is_refused_even_where_it_stands_still(
    trainer: tuple[Place, Path], tmp_path: Path, share: float
) -> None:
    place, folder = trainer
    path, to = folder / "model.safetensors", tmp_path / "checkpoint.safetensors"
    write(path, tensors())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    to.write_bytes(b"the one before")
    seen = place.look()
    with pytest.raises(CheckpointRefused, match="cut off"):
        take(place, seen, only("model.safetensors", seen), to)
    assert to.read_bytes() == b"the one before"


def test_a_file_that_is_written_to_after_the_look_is_refused(trainer: tuple[Place, Path], tmp_path: Path) -> None:
    place, folder = trainer
    write(folder / "model.safetensors", tensors())
    seen = place.look()
    write(folder / "model.safetensors", {"a": np.zeros(99)})
    place.look()
    with pytest.raises(CheckpointRefused, match="while it was being copied"):
        take(place, seen, only("model.safetensors", seen), tmp_path / "checkpoint.safetensors")


def test_an_onnx_file_with_its_tensors_elsewhere_is_refused(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    folder = tmp_path / "trainer"
    folder.mkdir()
    weight = onnx.numpy_helper.from_array(np.zeros((64, 64), np.float32), "w")
    graph = onnx.helper.make_graph([], "g", [], [], [weight])
    onnx.save(
        onnx.helper.make_model(graph),
        folder / "m.onnx",
        save_as_external_data=True,
        location="m.data",
        size_threshold=0,
    )
    place = FolderPlace(folder)
    seen = place.look()
    with pytest.raises(CheckpointRefused, match="other files"):
        take(place, seen, only("m.onnx", seen), tmp_path / "model.onnx")


def test_latest_may_be_a_link_to_a_folder(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / f"step-{number}/model.safetensors", tensors(number))
    os.symlink("step-1", tmp_path / "latest")
    place = FolderPlace(tmp_path)
    [found] = finished(place.look(), place.look(), place.text, PATTERN)
    assert found.name == "step-1/model.safetensors"


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="s3://BUCKET"):
        place_of("/nowhere/at/all")
