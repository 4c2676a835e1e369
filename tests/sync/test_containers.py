from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from common.tensorfile import write_tensors
from sync.containers import Layout, read_layout

ARRAYS = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "h": np.arange(6, dtype=np.float16),
    "q": np.arange(-4, 4, dtype=np.int8).reshape(2, 4),
    "scalar": np.array(3, dtype=np.int64),
}


def bytes_of(path: Path, layout: Layout) -> dict[str, bytes]:
    data = path.read_bytes()
    return {tensor.name: data[tensor.offset : tensor.offset + tensor.length] for tensor in layout.tensors}


def onnx_file(path: Path) -> Path:
    initializers = [numpy_helper.from_array(array, name) for name, array in ARRAYS.items()]
    initializers.append(helper.make_tensor("typed", TensorProto.FLOAT, [2], [1.0, 2.0]))  # float_data, not raw_data
    node = helper.make_node("Identity", ["x"], ["y"])
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xy"]
    onnx.save(helper.make_model(helper.make_graph([node], "g", value[:1], value[1:], initializers)), path)
    return path


def test_onnx_initializers_are_found_where_the_onnx_library_put_them(tmp_path: Path) -> None:
    path = onnx_file(tmp_path / "m.onnx")
    layout = read_layout(path)
    assert layout.container == "onnx"
    assert bytes_of(path, layout) == {name: array.tobytes() for name, array in ARRAYS.items()}
    assert {t.name: (t.dtype, t.shape) for t in layout.tensors} == {
        name: (str(array.dtype), array.shape) for name, array in ARRAYS.items()
    }


def test_safetensors_are_found_where_the_safetensors_library_put_them(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_tensors(path, ARRAYS)
    layout = read_layout(path)
    assert layout.container == "safetensors"
    assert bytes_of(path, layout) == {name: array.tobytes() for name, array in ARRAYS.items()}


def test_skeleton_and_tensors_together_are_every_byte_once(tmp_path: Path) -> None:
    path = onnx_file(tmp_path / "m.onnx")
    layout = read_layout(path)
    ranges = sorted([*layout.skeleton(), *((t.offset, t.length) for t in layout.tensors)])
    ends = [offset + length for offset, length in ranges]
    assert [offset for offset, _ in ranges] == [0, *ends[:-1]]
    assert ends[-1] == path.stat().st_size


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


def test_a_declaration_that_disagrees_with_its_bytes_is_taken_as_bytes(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    (tensor,) = read_layout(path).tensors
    assert (tensor.dtype, tensor.shape) == ("uint8", (8,))


def test_overlapping_or_overrunning_tensors_make_the_file_plain(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for second in ([4, 12], [8, 1 << 62], [-1, 2], [True, 9]):
        entries = {"a": [0, 8], "b": second}
        header = json.dumps({n: {"dtype": "U8", "shape": [8], "data_offsets": o} for n, o in entries.items()}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        assert read_layout(path).container == "plain"


@given(data=st.binary(max_size=400), suffix=st.sampled_from([".onnx", ".safetensors"]))
def test_no_bytes_crash_the_parser(tmp_path_factory, data: bytes, suffix: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("hostile") / f"m{suffix}"
    path.write_bytes(data)
    layout = read_layout(path)
    assert sum(t.length for t in layout.tensors) + sum(length for _, length in layout.skeleton()) == len(data)


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255), cut=st.integers(0, 10_000))
def test_a_damaged_onnx_file_is_still_laid_out_completely(tmp_path_factory, at: int, flip: int, cut: int) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("damaged") / "m.onnx"
    data = bytearray(onnx_file(path).read_bytes())
    data[at % len(data)] ^= flip
    del data[len(data) - cut % len(data) :]
    path.write_bytes(data)
    layout = read_layout(path)
    assert sum(t.length for t in layout.tensors) + sum(length for _, length in layout.skeleton()) == len(data)
