from __future__ import annotations

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from common.tensorfile import write_tensors
from sync.containers import Layout, Tensor, read_layout
from sync.slabs import cut, read_pieces, write_pieces

ARRAYS = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "h": np.arange(6, dtype=np.float16),
    "q": np.arange(-4, 4, dtype=np.int8).reshape(2, 4),
    "scalar": np.array(3, dtype=np.int64),
}
HOSTILE = settings(max_examples=40, deadline=None)


def bytes_of(path: Path, layout: Layout) -> dict[str, bytes]:
    data = path.read_bytes()
    return {tensor.name: data[tensor.offset : tensor.offset + tensor.length] for tensor in layout.tensors}


def rebuilt(path: Path) -> bytes:
    """What its slabs make of a file."""
    target_path = path.with_name("rebuilt")
    source, target = os.open(path, os.O_RDONLY), os.open(target_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        for one in cut(read_layout(path)):
            write_pieces(target, one.pieces, read_pieces(source, one.pieces))
    finally:
        os.close(source)
        os.close(target)
    return target_path.read_bytes()


def is_complete(layout: Layout, size: int) -> bool:
    return sum(t.length for t in layout.tensors) + sum(length for _, length in layout.skeleton()) == size


def model_of(initializers: list[TensorProto]) -> onnx.ModelProto:
    node = helper.make_node("Identity", ["x"], ["y"])
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xy"]
    return helper.make_model(helper.make_graph([node], "g", value[:1], value[1:], initializers))


def onnx_file(path: Path) -> Path:
    initializers = [numpy_helper.from_array(array, name) for name, array in ARRAYS.items()]
    initializers.append(helper.make_tensor("typed", TensorProto.FLOAT, [2], [1.0, 2.0]))  # float_data, not raw_data
    onnx.save(model_of(initializers), path)
    return path


def tensor(dtype: str, *shape: int, length: int = 1) -> Tensor:
    return Tensor(name="t", dtype=dtype, shape=shape, offset=0, length=length)


def test_onnx_initializers_are_found_where_the_onnx_library_put_them(tmp_path: Path) -> None:
    path = onnx_file(tmp_path / "m.onnx")
    layout = read_layout(path)
    assert layout.container == "onnx"
    assert bytes_of(path, layout) == {name: array.tobytes() for name, array in ARRAYS.items()}
    assert {t.name: (t.dtype, t.shape) for t in layout.tensors} == {
        name: (str(array.dtype), array.shape) for name, array in ARRAYS.items()
    }


def test_onnx_types_under_a_byte_and_fp8_are_bytes_with_rows(tmp_path: Path) -> None:
    shape = (16, 129)
    kinds = [
        ("int4", TensorProto.INT4, ml_dtypes.int4, 0, 16 * 129 // 2),
        ("float8_e4m3fn", TensorProto.FLOAT8E4M3FN, ml_dtypes.float8_e4m3fn, 3, 16 * 129),
        ("float8_e5m2", TensorProto.FLOAT8E5M2, ml_dtypes.float8_e5m2, 2, 16 * 129),
    ]
    arrays = {name: np.ones(shape, dtype) for name, _, dtype, _, _ in kinds}
    path = tmp_path / "m.onnx"
    onnx.save(model_of([numpy_helper.from_array(array, name) for name, array in arrays.items()]), path)
    found = {one.name: one for one in read_layout(path).tensors}
    assert {one.name: (one.dtype, one.shape, one.width, one.mantissa, one.length) for one in found.values()} == {
        name: (name, shape, 1, mantissa, length) for name, _, _, mantissa, length in kinds
    }
    assert (found["int4"].row, found["float8_e5m2"].row) == (129, 129)  # two rows of 64.5 bytes, one of 129


def test_safetensors_are_found_where_the_safetensors_library_put_them(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_tensors(path, ARRAYS)
    layout = read_layout(path)
    assert layout.container == "safetensors"
    assert bytes_of(path, layout) == {name: array.tobytes() for name, array in ARRAYS.items()}


@pytest.mark.parametrize("name", ["blob", "m.SAFETENSORS", "weights.bin"])
def test_safetensors_are_known_by_their_content_too(tmp_path: Path, name: str) -> None:
    write_tensors(tmp_path / name, {"a": np.zeros((3, 5), np.float32)})
    layout = read_layout(tmp_path / name)
    assert (layout.container, [one.name for one in layout.tensors]) == ("safetensors", ["a"])
    (tmp_path / name).write_bytes((9).to_bytes(8, "little") + b"{ but not JSON, and longer")
    assert read_layout(tmp_path / name).container == "plain"


@pytest.mark.parametrize("write", [onnx_file, lambda path: write_tensors(path, ARRAYS)])
def test_skeleton_and_tensors_together_are_every_byte_once(tmp_path: Path, write) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / ("m.onnx" if write is onnx_file else "m.safetensors")
    write(path)
    layout = read_layout(path)
    ranges = sorted([*layout.skeleton(), *((t.offset, t.length) for t in layout.tensors)])
    ends = [offset + length for offset, length in ranges]
    assert [offset for offset, _ in ranges] == [0, *ends[:-1]]
    assert ends[-1] == path.stat().st_size
    assert rebuilt(path) == path.read_bytes()


def test_other_files_are_one_plain_tensor(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes(b"cat\ndog\n")
    layout = read_layout(path)
    assert (layout.container, layout.skeleton()) == ("plain", ())
    assert bytes_of(path, layout) == {"": b"cat\ndog\n"}


def test_an_empty_file_has_no_tensor(tmp_path: Path) -> None:
    for name in ("a.bin", "a.onnx", "a.safetensors"):
        (tmp_path / name).touch()
        assert read_layout(tmp_path / name).tensors == ()


def test_the_mantissa_is_that_of_the_floating_point_format() -> None:
    bits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7, "float8_e5m2": 2, "float8_e4m3fnuz": 3}
    assert {name: tensor(name).mantissa for name in bits} == bits
    assert {name: np.finfo(name).nmant for name in ("float64", "float32", "float16")}.items() <= bits.items()
    assert [tensor(name).mantissa for name in ("int8", "uint64", "bool", "int4", "q4_0")] == [0] * 5


@pytest.mark.parametrize(
    ("dtype", "shape", "row"),
    [
        ("float32", (), 256),
        ("float32", (10_000,), 256),
        ("bfloat16", (1536, 384), 384),
        ("float32", (256, 64, 3, 3), 576),
        ("float32", (32, 1, 3, 3), 72),  # eight rows of 9
        ("int8", (100, 64), 64),
        ("int8", (100, 63), 126),
        ("float16", (4096, 11_008), 2752),  # a quarter
        ("float16", (8, 14_336, 2048), 2048),  # experts: the last dimension
        ("float32", (512, 512, 3, 3), 2304),  # 4608 by two, rather than rows of 9
        ("float32", (10, 8209), 4096),  # a prime
        ("uint4", (64, 4096), 2048),
        ("q4_0", (64, 4096), 2304),  # 128 blocks of 18 bytes
        ("complex64", (64, 100), 200),
    ],
)
def test_a_row_is_that_of_the_tensor_joined_or_split(dtype: str, shape: tuple[int, ...], row: int) -> None:
    assert tensor(dtype, *shape).row == row


def safetensors_of(path: Path, entries: dict[str, object], data: int) -> Path:
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data))
    return path


def test_a_declaration_that_disagrees_with_its_bytes_is_taken_as_bytes(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}
    (found,) = read_layout(safetensors_of(tmp_path / "m.safetensors", {"a": entry}, 8)).tensors
    assert (found.dtype, found.shape) == ("uint8", (8,))


def test_safetensors_fp8_and_packed_fp4_are_known(tmp_path: Path) -> None:
    lengths = {"F8_E4M3": 300, "F8_E5M2": 300, "F4": 150, "F6_E2M3": 225}
    entries, at = {}, 0
    for kind, length in lengths.items():
        entries[kind] = {"dtype": kind, "shape": [3, 100], "data_offsets": [at, at + length]}
        at += length
    found = read_layout(safetensors_of(tmp_path / "m.safetensors", dict(entries), at)).tensors
    assert [(one.dtype, one.mantissa, one.row) for one in found] == [
        ("float8_e4m3fn", 3, 100),
        ("float8_e5m2", 2, 100),
        ("float4_e2m1", 0, 100),  # two rows of 50 bytes
        ("float6_e2m3", 0, 75),
    ]


def test_a_name_that_cannot_be_written_is_replaced(tmp_path: Path) -> None:
    entry = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    path = safetensors_of(tmp_path / "m.safetensors", {"\ud800": entry}, 8)
    assert [one.name for one in read_layout(path).tensors] == [f"at {path.stat().st_size - 8}"]


def test_overlapping_or_overrunning_tensors_make_the_file_plain(tmp_path: Path) -> None:
    for second in ([4, 12], [8, 1 << 62], [-1, 2], [True, 9]):
        offsets = {"a": [0, 8], "b": second}
        entries = {name: {"dtype": "U8", "shape": [8], "data_offsets": range_} for name, range_ in offsets.items()}
        assert read_layout(safetensors_of(tmp_path / "m.safetensors", dict(entries), 16)).container == "plain"


@pytest.mark.parametrize("header", [b"[" * 100_000, b"{" * 3_000_000, b'{"a":' + b"[0," * 3_000_000, b"0" * 100_000])
def test_a_deep_or_huge_header_is_refused_before_it_is_built(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert read_layout(path).container == "plain"


@given(
    data=st.binary(max_size=400),
    start=st.sampled_from([b"", b"GGUF\x03\0\0\0", b"PK\x03\x04"]),
    suffix=st.sampled_from([".onnx", ".safetensors", ".bin"]),
)
@HOSTILE
def test_no_bytes_crash_a_reader(tmp_path_factory, data: bytes, start: bytes, suffix: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("hostile") / f"m{suffix}"
    path.write_bytes(start + data)
    assert is_complete(read_layout(path), len(start + data))


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255), cut=st.integers(0, 10_000))
@HOSTILE
def test_a_damaged_onnx_file_is_still_laid_out_completely(tmp_path_factory, at: int, flip: int, cut: int) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("damaged") / "m.onnx"
    data = bytearray(onnx_file(path).read_bytes())
    data[at % len(data)] ^= flip
    del data[len(data) - cut % len(data) :]
    path.write_bytes(data)
    assert is_complete(read_layout(path), len(data))
