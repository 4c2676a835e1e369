"""GGUF files made by hand from docs/gguf.md of ggml: the block sizes are those of its structs, written out here."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.containers import read_layout
from tests.sync.test_containers import bytes_of, is_complete, rebuilt

F32, F16, Q4_0, Q6_K, I8, BF16, LATER = 0, 1, 2, 14, 24, 30, 999
UINT32, STRING, ARRAY, UINT8 = 4, 8, 9, 0


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


TOKENS = [
    key("general.architecture", STRING, text("llama")),
    key("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, text("a") + text("") + text("words"))),
    key("tokenizer.ggml.kinds", ARRAY, array(UINT8, 3, b"\1\2\3")),
    key("nested", ARRAY, array(ARRAY, 2, 2 * array(UINT32, 2, bytes(8)))),
]


def gguf(
    tensors: list[tuple[str, int, tuple[int, ...], bytes]], *, alignment: int | None = None, version: int = 3
) -> bytes:
    """Tensors as (name, type, shape with the slowest dimension first, data)."""
    keys = [*TOKENS, *([] if alignment is None else [key("general.alignment", UINT32, struct.pack("<I", alignment))])]
    step, infos, data = alignment or 32, b"", b""
    for name, kind, shape, raw in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos += text(name) + dims + struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % step)
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(keys)) + b"".join(keys) + infos
    return head + bytes(-len(head) % step) + data


def filled(length: int) -> bytes:
    return np.random.default_rng(length).bytes(length)


TENSORS = [
    ("token_embd.weight", Q4_0, (5, 64), filled(5 * 2 * 18)),
    ("blk.0.attn_norm.weight", F32, (33,), filled(132)),
    ("blk.0.ffn_up.weight", Q6_K, (3, 512), filled(3 * 2 * 210)),
    ("blk.0.attn_q.weight", BF16, (7, 65), filled(910)),
    ("blk.0.experts", F16, (2, 3, 4), filled(48)),
    ("later", LATER, (4, 16), filled(64)),
    ("last", I8, (10,), filled(10)),
]


@pytest.mark.parametrize(("alignment", "version"), [(None, 3), (64, 3), (8, 2)])
def test_tensors_are_found_at_their_offsets(tmp_path: Path, alignment: int | None, version: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(TENSORS, alignment=alignment, version=version))
    layout = read_layout(path)
    assert layout.container == "gguf"
    assert bytes_of(path, layout) == {name: data for name, _, _, data in TENSORS}
    assert {one.name: (one.dtype, one.shape) for one in layout.tensors} == {
        "token_embd.weight": ("q4_0", (5, 64)),
        "blk.0.attn_norm.weight": ("float32", (33,)),
        "blk.0.ffn_up.weight": ("q6_k", (3, 512)),
        "blk.0.attn_q.weight": ("bfloat16", (7, 65)),
        "blk.0.experts": ("float16", (2, 3, 4)),
        "later": ("uint8", (64,)),  # a type of a later version reaches to the next tensor
        "last": ("int8", (10,)),
    }
    assert rebuilt(path) == path.read_bytes()


def test_a_row_of_a_quantized_tensor_is_the_blocks_of_one_row(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(TENSORS))
    rows = {one.name: (one.width, one.mantissa, one.row) for one in read_layout(path).tensors}
    assert rows["blk.0.ffn_up.weight"] == (1, 0, 420)
    assert rows["token_embd.weight"] == (1, 0, 72)  # two rows of 36 bytes
    assert rows["blk.0.attn_q.weight"] == (2, 7, 65)


@pytest.mark.parametrize(
    ("at", "field"),
    [
        (4, struct.pack("<I", 1)),  # a version with other widths
        (4, struct.pack(">I", 3)),  # big-endian
        (8, struct.pack("<Q", 1 << 60)),  # tensors
        (8, struct.pack("<Q", 8)),  # one more than there are
        (16, struct.pack("<Q", 1 << 63)),  # keys
        (24, struct.pack("<Q", (1 << 64) - 1)),  # length of the first key
    ],
)
def test_a_header_that_cannot_be_true_makes_the_file_plain(tmp_path: Path, at: int, field: bytes) -> None:
    data = bytearray(gguf(TENSORS))
    data[at : at + len(field)] = field
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert read_layout(path).container == "plain"


def test_a_vocabulary_without_tensors_is_all_skeleton(tmp_path: Path) -> None:
    path = tmp_path / "vocab.gguf"
    path.write_bytes(gguf([]))
    layout = read_layout(path)
    assert (layout.container, layout.tensors, layout.skeleton()) == ("gguf", (), ((0, path.stat().st_size),))


def test_arrays_in_arrays_without_end_make_the_file_plain(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    deep = key("deep", ARRAY, array(ARRAY, 1, b"") * 5000)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + deep)
    assert read_layout(path).container == "plain"


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255), cut=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_is_still_laid_out_completely(tmp_path_factory, at: int, flip: int, cut: int) -> None:  # type: ignore[no-untyped-def]
    data = bytearray(gguf(TENSORS))
    data[at % len(data)] ^= flip
    del data[len(data) - cut % len(data) :]
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    path.write_bytes(data)
    assert is_complete(read_layout(path), len(data))


def test_a_file_is_laid_out_without_holding_it_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf([("w", F32, (4096, 4096), b"")]))
    start = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(start + 4 * 4096 * 4096)
    tracemalloc.start()
    layout = read_layout(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [(one.name, one.offset, one.length) for one in layout.tensors] == [("w", start, 64 << 20)]
    assert peak_bytes < 256 << 10
