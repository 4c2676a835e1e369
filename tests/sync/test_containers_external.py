from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper

from sync.containers import read_layout
from tests.sync.test_containers import HOSTILE, bytes_of, is_complete, model_of, rebuilt

ARRAYS = {
    "w": np.arange(3000, dtype=np.float32).reshape(30, 100),
    "h": np.arange(700, dtype=np.float16),
    "q": np.arange(2000, dtype=np.int8).reshape(20, 100),
}


def external_model(path: Path, data_name: str = "m.onnx.data") -> Path:
    """Written by the onnx library; answers with the data file."""
    model = model_of([numpy_helper.from_array(array, name) for name, array in ARRAYS.items()])
    onnx.save(model, path, save_as_external_data=True, location=data_name, size_threshold=0)
    return path.parent / data_name


def referring(path: Path, **entries: dict[str, str]) -> Path:
    """A model whose initializers (8 bytes of int8 each) lie where `entries` say."""
    initializers = []
    for name, external in entries.items():
        one = TensorProto(name=name, data_type=TensorProto.INT8, dims=[8], data_location=TensorProto.EXTERNAL)
        for key, value in external.items():
            one.external_data.add(key=key, value=value)
        initializers.append(one)
    onnx.save(model_of(initializers), path)
    return path


def test_a_data_file_is_laid_out_by_the_model_beside_it(tmp_path: Path) -> None:
    data = external_model(tmp_path / "m.onnx")
    layout = read_layout(data)
    assert layout.container == "onnx-data"
    assert bytes_of(data, layout) == {name: array.tobytes() for name, array in ARRAYS.items()}
    assert {one.name: (one.dtype, one.shape) for one in layout.tensors} == {
        name: (str(array.dtype), array.shape) for name, array in ARRAYS.items()
    }
    assert rebuilt(data) == data.read_bytes()
    assert read_layout(tmp_path / "m.onnx").tensors == ()


def test_padding_between_tensors_is_kept_as_skeleton(tmp_path: Path) -> None:
    location = {"location": "./weights.bin"}
    referring(
        tmp_path / "m.onnx",
        first={**location, "offset": "4096", "length": "8"},
        rest={**location, "offset": "8192"},  # as long as its shape says
    )
    data = tmp_path / "weights.bin"
    data.write_bytes(bytes(range(1, 65)) * 200)
    layout = read_layout(data)
    assert [(one.name, one.offset, one.length) for one in layout.tensors] == [("first", 4096, 8), ("rest", 8192, 8)]
    assert layout.skeleton() == ((0, 4096), (4104, 4088), (8200, 4600))
    assert rebuilt(data) == data.read_bytes()


def test_tied_weights_are_laid_out_once(tmp_path: Path) -> None:
    place = {"location": "weights.bin", "offset": "8", "length": "8"}
    referring(tmp_path / "m.onnx", embedding=place, head=place)
    (tmp_path / "weights.bin").write_bytes(bytes(16))
    assert [one.name for one in read_layout(tmp_path / "weights.bin").tensors] == ["embedding"]


def test_a_model_that_contradicts_the_one_of_the_same_name_is_ignored(tmp_path: Path) -> None:
    data = external_model(tmp_path / "m.onnx")
    referring(tmp_path / "a.onnx", stale={"location": data.name, "offset": "5", "length": "8"})
    (tmp_path / "broken.onnx").write_bytes(b"\xff" * 100)
    assert {one.name for one in read_layout(data).tensors} == set(ARRAYS)


@pytest.mark.parametrize(
    "external",
    [
        {"location": "../weights.bin"},
        {"location": "other.bin"},
        {"location": "weights.bin", "offset": "-1"},
        {"location": "weights.bin", "offset": "10", "length": "8"},
        {"location": "weights.bin", "length": "9" * 30},
        {"offset": "0"},
    ],
)
def test_a_reference_elsewhere_or_out_of_the_file_is_no_layout(tmp_path: Path, external: dict[str, str]) -> None:
    referring(tmp_path / "m.onnx", a=external)
    (tmp_path / "weights.bin").write_bytes(bytes(16))
    assert read_layout(tmp_path / "weights.bin").container == "plain"


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255), cut=st.integers(0, 10_000))
@HOSTILE
def test_a_damaged_model_leaves_the_data_laid_out_completely(tmp_path_factory, at: int, flip: int, cut: int) -> None:  # type: ignore[no-untyped-def]
    data = external_model(tmp_path_factory.mktemp("damaged") / "m.onnx")
    model = bytearray((data.parent / "m.onnx").read_bytes())
    model[at % len(model)] ^= flip
    del model[len(model) - cut % len(model) :]
    (data.parent / "m.onnx").write_bytes(model)
    assert is_complete(read_layout(data), data.stat().st_size)
