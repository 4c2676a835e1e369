from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from common.tensorfile import write_tensors
from sync.containers import Layout, Tensor, read_layout
from sync.slabs import GROUP_BYTES, SLAB_BYTES, SMALL_BYTES, Cut, cut, read_pieces, slab_id, write_pieces


def layout_of(*tensors: tuple[str, str, tuple[int, ...], int]) -> Layout:
    """Tensors (name, dtype, shape, bytes) one after the other, eight bytes of skeleton before each."""
    at, found = 0, []
    for name, dtype, shape, length in tensors:
        found.append(Tensor(name=name, dtype=dtype, shape=shape, offset=at + 8, length=length))
        at += 8 + length
    return Layout(size=at, container="safetensors", tensors=tuple(found))


def by_key(layout: Layout) -> dict[str, Cut]:
    return {one.key: one for one in cut(layout)}


def test_an_id_is_the_blake3_of_the_raw_bytes() -> None:
    assert slab_id(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"  # the official vector
    assert slab_id(b"abc") == blake3(b"abc").hexdigest()


def test_a_large_tensor_is_cut_between_rows() -> None:
    row = 3000 * 4
    cuts = [one for one in cut(layout_of(("w", "float32", (1000, 3000), 1000 * row))) if one.key.startswith("t/")]
    assert [one.key for one in cuts] == [f"t/w/{i}" for i in range(len(cuts))]
    assert all(one.length % row == 0 and one.length <= SLAB_BYTES for one in cuts)
    assert sum(one.length for one in cuts) == 1000 * row


def test_a_row_longer_than_a_slab_is_cut_between_elements() -> None:
    cuts = cut(layout_of(("w", "float64", (2, 300_000), 4_800_000)))
    assert all(one.length <= SLAB_BYTES and one.length % 8 == 0 for one in cuts)


def test_small_tensors_merge_per_element_type_and_large_ones_never_do() -> None:
    layout = layout_of(
        ("a", "int8", (100,), 100),
        ("big", "int8", (1, SMALL_BYTES), SMALL_BYTES),
        ("b", "float32", (25,), 100),
        ("c", "int32", (25,), 100),
        ("d", "int8", (7,), 7),
    )
    cuts = by_key(layout)
    assert cuts["t/big/0"].length == SMALL_BYTES
    assert cuts["m1/a"].length == 107
    assert (cuts["m4/b"].mantissa, cuts["m4/c"].mantissa) == (23, 0)


def test_bf16_and_fp16_do_not_share_a_group() -> None:
    cuts = by_key(layout_of(("a", "bfloat16", (50,), 100), ("b", "float16", (50,), 100), ("c", "bfloat16", (50,), 100)))
    assert [(key, one.mantissa, one.length) for key, one in sorted(cuts.items()) if key[0] == "m"] == [
        ("m2/a", 7, 200),
        ("m2/b", 10, 100),
    ]


def test_a_slab_begins_where_a_row_of_the_codec_begins() -> None:
    for shape, row in (((150_000, 9), 72), ((400, 6000), 3000), ((200, 4096), 4096), ((3, 700_001), 4096)):
        cuts = [one for one in cut(layout_of(("w", "bfloat16", shape, 2 * shape[0] * shape[1]))) if one.key[0] == "t"]
        starts = [one.pieces[0][0] - cuts[0].pieces[0][0] for one in cuts]
        assert len(cuts) > 1
        assert {one.row for one in cuts} == {row}
        assert all(start % (2 * row) == 0 and one.length <= SLAB_BYTES for start, one in zip(starts, cuts, strict=True))


def test_the_skeleton_and_merged_groups_have_the_row_of_what_has_no_rows() -> None:
    cuts = by_key(layout_of(("a", "float32", (10, 10), 400)))
    assert {(one.width, one.mantissa, one.row) for one in cuts.values()} == {(1, 0, 256), (4, 23, 256)}


def test_groups_stay_under_their_limit() -> None:
    layout = layout_of(*((f"t{i}", "float32", (3000,), 12_000) for i in range(40)))
    assert all(one.length <= GROUP_BYTES for one in cut(layout))


def test_a_tensor_that_grows_moves_the_borders_of_its_own_group_only() -> None:
    old = [(f"layer.{i}.bias", "float32", (100 + i,), 4 * (100 + i)) for i in range(200)]
    new = list(old)
    new[50] = ("layer.50.bias", "float32", (4000,), 16_000)
    lengths = {one.key: one.length for one in cut(layout_of(*old)) if one.key.startswith("m")}
    changed = [
        one.key for one in cut(layout_of(*new)) if one.key.startswith("m") and lengths.get(one.key) != one.length
    ]
    assert len(lengths) > 8
    assert len(changed) <= 2


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(["float32", "float16", "int8"]), st.integers(0, 300), st.integers(0, 90)), max_size=12
    )
)
@settings(max_examples=40, deadline=None)
def test_every_byte_of_a_file_is_in_exactly_one_slab(tmp_path_factory, shapes) -> None:  # type: ignore[no-untyped-def]
    path: Path = tmp_path_factory.mktemp("cut") / "m.safetensors"
    write_tensors(path, {f"t{i}": np.ones((rows, columns), dtype) for i, (dtype, rows, columns) in enumerate(shapes)})
    data, rebuilt = path.read_bytes(), path.with_name("rebuilt")
    source, target = os.open(path, os.O_RDONLY), os.open(rebuilt, os.O_WRONLY | os.O_CREAT)
    cuts = cut(read_layout(path))
    for one in cuts:
        write_pieces(target, one.pieces, read_pieces(source, one.pieces))
    os.close(source)
    os.close(target)
    assert rebuilt.read_bytes() == data
    assert sum(one.length for one in cuts) == len(data)
