import numpy as np
import pytest

from common.errors import InvalidInput
from common.tensors import as_tensor, datatype_of, element_count, pack, unpack


@pytest.mark.parametrize("dtype", ["?", "u1", "<u2", "<u4", "<u8", "i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8"])
def test_every_dtype_survives_the_wire(dtype: str) -> None:
    array = (np.arange(6) % 2).reshape(2, 3).astype(dtype)
    back = unpack(pack(array), datatype_of(array), (2, 3), "x")
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype


def test_strings_and_bytes_are_length_prefixed() -> None:
    array = np.array(["a", b"\xff\x00"], dtype=object)
    assert pack(array) == b"\x01\x00\x00\x00a\x02\x00\x00\x00\xff\x00"  # the layout of the binary extension
    assert unpack(pack(array), "BYTES", (2,), "x").tolist() == [b"a", b"\xff\x00"]


def test_big_endian_arrays_travel_as_little_endian() -> None:
    array = np.array([1.0, 2.0], ">f4")
    assert pack(as_tensor(array, "x")) == np.array([1.0, 2.0], "<f4").tobytes()
    assert pack(array) == np.array([1.0, 2.0], "<f4").tobytes()


@pytest.mark.parametrize("value", [np.array([1j]), np.array([object()]), np.array([3, None], dtype=object)])
def test_what_no_datatype_carries_is_refused_by_name(value: np.ndarray) -> None:
    with pytest.raises(InvalidInput, match=r"x: .*; accepted: BOOL"):
        as_tensor(value, "x")


def test_lists_and_numpy_strings_are_taken_as_the_arrays_they_mean() -> None:
    assert as_tensor([[1.0, 2.0]], "x").dtype == np.float64
    assert as_tensor(np.array(["ab"]), "x").tolist() == ["ab"]


@pytest.mark.parametrize("shape", [(-1, 2), (2**40, 2**40), (0, 2**62, 2**62), (True, 2), (1.5,)])
def test_shapes_that_cannot_be_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput):
        element_count(shape, "x.shape")


@pytest.mark.parametrize(
    "data", [b"", b"\x01\x00\x00", b"\x05\x00\x00\x00abc", b"\x01\x00\x00\x00a" + b"extra", b"\xff\xff\xff\xff"]
)
def test_broken_bytes_tensors_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        unpack(data, "BYTES", (1,), "x")
