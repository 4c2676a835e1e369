"""What the codec's benchmark compares: files that are what they say, peers that may be missing, a fair verdict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from benchmarks.codec import synthetic
from benchmarks.codec.files import quantized, read, to_bf16, write
from benchmarks.codec.ours import Ours
from benchmarks.codec.peers import PEERS, measured

TINY = 0.02


def test_a_written_file_is_one_to_the_library_of_the_format(tmp_path: Path) -> None:
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.zeros((0, 4), np.int8)}
    path = write(tmp_path / "file.safetensors", tensors)
    with safe_open(path, framework="np") as file:
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118  # not a dict
            "a": [],
            "b": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        }
    assert {name: one.shape for name, one in read(path).items()} == {"a": (0, 4), "b": (2, 3)}


def test_bf16_is_rounded_to_the_nearest_and_ties_to_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF], np.uint32)
    assert to_bf16(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF80]


def test_int8_follows_the_recipe_and_clips_where_scales_are_kept() -> None:
    words = to_bf16(np.array([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]], np.float32))
    made = quantized({"w": words, "bias": words[0]})
    assert made["w"].tolist() == [[64, -127, 32], [0, 0, 0]]  # 63.5 to even, 31.75
    assert made["w.scale"].tolist() == [[pytest.approx(1 / 127)], [1.0]]
    assert made["bias"].tolist() == [0.5, -1.0, 0.25]
    kept = quantized({"w": to_bf16(np.array([[2.0, -1.0, 0.25], [3.0, 0.0, 0.0]], np.float32))}, like=made)
    assert kept["w"].tolist() == [[127, -127, 32], [3, 0, 0]]
    assert kept["w.scale"].tolist() == made["w.scale"].tolist()


@pytest.mark.parametrize("kind", synthetic.KINDS)
def test_a_generated_pair_has_the_same_tensors_twice_and_moves_unless_it_says_not(kind: str) -> None:
    old, new = synthetic.KINDS[kind](TINY)
    assert {name: (one.dtype, one.shape) for name, one in old.items()} == {
        name: (one.dtype, one.shape) for name, one in new.items()
    }
    moved = {name for name in old if old[name].tobytes() != new[name].tobytes()}
    assert bool(moved) == (kind != "identical")
    if kind == "last layer":
        assert all(name.startswith("layer.3.") for name in moved)


def test_a_peer_without_its_package_has_no_figure_and_the_others_have_theirs(tmp_path: Path) -> None:
    old = write(tmp_path / "old", {"w": np.zeros((8, 8), np.uint16)})
    new = write(tmp_path / "new", {"w": np.full((8, 8), 7, np.uint16)})
    found = measured(old, new, ("z4ai", "PULSE-like"), None)
    assert found["z4ai"] is None
    assert 0 < (found["PULSE-like"] or 0) < 100
    assert set(found) < set(PEERS)


def test_the_verdict_allows_index_manifest_and_one_percent_and_no_more() -> None:
    ours = Ours(
        raw=1000,
        payload=101,
        index=10,
        manifest=5,
        bound=90,
        full=100,
        forms={},
        encode_s=1,
        rebuild_s=1,
        rebuild_cpu_s=1,
    )
    assert ours.wire == 116
    assert ours.is_near(100)
    assert not ours.is_near(99)
    assert ours.is_within_full
    assert not Ours(
        raw=1000,
        payload=102,
        index=0,
        manifest=0,
        bound=90,
        full=100,
        forms={},
        encode_s=1,
        rebuild_s=1,
        rebuild_cpu_s=1,
    ).is_within_full
