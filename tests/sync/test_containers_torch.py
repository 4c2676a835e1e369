from __future__ import annotations

import functools
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.containers import read_layout
from tests.sync.test_containers import bytes_of, is_complete, rebuilt


def saved(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def described(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {one.name: (one.dtype, one.shape) for one in read_layout(path).tensors}


def archive(path: Path, pickled: bytes, *, storage: bytes = bytes(64), method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/data/0", storage)
    return path


class Foreign:
    """A class of somebody else, which runs code when it is unpickled."""

    def __init__(self, victim: Path, weight: torch.Tensor) -> None:
        self.victim, self.weight = victim, weight

    def __reduce__(self) -> tuple[Any, ...]:
        return touch, (self.victim, {"weight": self.weight})


def touch(victim: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    victim.touch()
    return state


STATE = {
    "layer.weight": torch.arange(300, dtype=torch.float32).reshape(3, 100),
    "layer.half": torch.arange(8).to(torch.bfloat16).reshape(2, 4),
    "layer.fp8": torch.arange(16).to(torch.float8_e4m3fn).reshape(4, 4),
    "layer.ids": torch.arange(5),
    "layer.flag": torch.tensor(True),
}


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_state_dict_is_found_where_torch_put_it(tmp_path: Path, protocol: int) -> None:
    path = saved(tmp_path / "m.pt", STATE, pickle_protocol=protocol)
    layout = read_layout(path)
    assert layout.container == "torch"
    assert bytes_of(path, layout) == {name: raw(one) if one.ndim else b"\1" for name, one in STATE.items()}
    assert described(path) == {
        "layer.weight": ("float32", (3, 100)),
        "layer.half": ("bfloat16", (2, 4)),
        "layer.fp8": ("float8_e4m3fn", (4, 4)),
        "layer.ids": ("int64", (5,)),
        "layer.flag": ("bool", ()),
    }
    assert rebuilt(path) == path.read_bytes()


def test_nested_checkpoints_have_paths_as_names(tmp_path: Path) -> None:
    moments = {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3, 4)}}  # as optimizers have them
    content = {
        "epoch": 3,
        "model": torch.nn.Linear(4, 3).state_dict(),
        "optimizer": {"state": moments, "lr": [1e-3, None, (torch.zeros(2),)]},
    }
    assert described(saved(tmp_path / "m.ckpt", content)) == {
        "model.weight": ("float32", (3, 4)),
        "model.bias": ("float32", (3,)),
        "optimizer.state.0.step": ("float32", ()),
        "optimizer.state.0.exp_avg": ("float32", (3, 4)),
        "optimizer.lr.2.0": ("float32", (2,)),
    }


def test_shared_storage_is_laid_out_once(tmp_path: Path) -> None:
    flat = torch.arange(24, dtype=torch.float32)
    content = {
        "a": flat[:8],
        "b": flat[8:].reshape(4, 4),
        "tied": STATE["layer.weight"],
        "again": STATE["layer.weight"],
    }
    path = saved(tmp_path / "m.pt", content)
    assert described(path) == {"a": ("float32", (24,)), "tied": ("float32", (3, 100))}
    assert bytes_of(path, read_layout(path))["a"] == raw(flat)


def test_a_transposed_tensor_has_the_shape_of_its_storage(tmp_path: Path) -> None:
    weight = torch.arange(600, dtype=torch.float32).reshape(6, 100)
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    content = {"turned": weight.t(), "every_other": torch.zeros(10)[::2], "image": image}
    assert described(saved(tmp_path / "m.pt", content)) == {
        "turned": ("float32", (6, 100)),
        "every_other": ("float32", (10,)),
        "image": ("float32", (2, 4, 5, 3)),
    }


def test_a_foreign_class_is_looked_through_and_not_run(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    path = saved(tmp_path / "m.pt", {"it": Foreign(victim, STATE["layer.weight"]), "last": torch.zeros(2)})
    assert described(path) == {"it.1.weight": ("float32", (3, 100)), "last": ("float32", (2,))}
    assert not victim.exists()
    torch.load(path, weights_only=False)
    assert victim.exists()  # it would have run


def test_a_whole_module_is_laid_out(tmp_path: Path) -> None:
    found = described(saved(tmp_path / "whole.pt", torch.nn.Linear(4, 3)))
    assert found == {"_parameters.weight": ("float32", (3, 4)), "_parameters.bias": ("float32", (3,))}


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b"\x80\x02",
        b"garbage",
        b"\x80\x02" + b"(" * 1000 + b".",
        b"\x80\x02K\x01Q.",  # a persistent id that is a number
        pickle.dumps({"a": 1}, protocol=0),
    ],
)
def test_storages_of_an_unreadable_pickle_are_bytes(tmp_path: Path, pickled: bytes) -> None:
    assert described(archive(tmp_path / "m.pt", pickled)) == {"data/0": ("uint8", (64,))}


def test_a_pickle_of_too_many_steps_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "m.pt", {"w": torch.zeros(4)})
    monkeypatch.setattr("sync.containers.pickles.MAX_STEPS", 10)
    assert described(path) == {"data/0": ("uint8", (16,))}


def test_circular_and_deeply_nested_pickles_end(tmp_path: Path) -> None:
    circular: list[Any] = []
    circular.append((circular, {"self": circular}))
    wide: Any = ()
    for _ in range(60):
        wide = (wide, wide)  # 2^60 paths
    for pickled in (pickle.dumps([circular, wide], protocol=2), b"\x80\x02)" + b"\x85" * 20_000 + b"."):
        assert described(archive(tmp_path / "m.pt", pickled)) == {"data/0": ("uint8", (64,))}


def test_compressed_and_other_archives_are_plain(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", a=np.zeros(8))
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    paths = [tmp_path / "arrays.npz", tmp_path / "old.pt", tmp_path / "deflated.pt"]
    archive(paths[-1], pickle.dumps({}, protocol=2), method=zipfile.ZIP_DEFLATED)
    assert [read_layout(path).container for path in paths] == ["plain"] * 3


def test_a_zip64_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 32)  # as if every size and offset were over 4 GB
    path = archive(tmp_path / "m.pt", pickle.dumps({}, protocol=2), storage=b"abcd" * 16)
    assert path.read_bytes().count(b"PK\x06\x06") == 1
    assert bytes_of(path, read_layout(path)) == {"data/0": b"abcd" * 16}


@functools.cache
def small_checkpoint() -> bytes:
    file = io.BytesIO()
    torch.save({"w": torch.zeros(8, 8), "b": [torch.ones(3)]}, file)
    return file.getvalue()


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255), cut=st.integers(0, 10_000), cuts=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_damaged_archive_is_still_laid_out_completely(tmp_path_factory, at, flip, cut, cuts) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("damaged") / "m.pt"
    data = bytearray(small_checkpoint())
    data[at % len(data)] ^= flip
    if cuts:
        del data[len(data) - cut % len(data) :]
    path.write_bytes(data)
    assert is_complete(read_layout(path), len(data))
