from __future__ import annotations

import json
import random

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sync.manifests import pack, packed_name, unpack


def some(seed: int, count: int = 200) -> bytes:
    """Like a manifest: names that stay, ids that do not."""
    rng = random.Random(seed)
    slabs = [{"key": f"t/layer.{number}.weight/0", "id": rng.randbytes(32).hex()} for number in range(count)]
    return json.dumps(slabs).encode()


@given(data=st.binary(max_size=500), base=st.binary(max_size=500))
def test_what_is_packed_is_unpacked(data: bytes, base: bytes) -> None:
    assert unpack(pack(data, base), base) == data


def test_only_ids_are_left_between_two_versions() -> None:
    new, old = some(1), some(2)
    assert 200 * 32 < len(pack(new, old)) < 200 * 32 * 1.1 < len(pack(new))


def test_the_zstd_program_could_read_it() -> None:
    """A plain frame, and one with the other manifest before it, as `zstd --patch-from` has it."""
    new, old = some(1), some(2)
    assert zstandard.decompress(pack(new)) == new
    dictionary = zstandard.ZstdCompressionDict(old, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    assert zstandard.ZstdDecompressor(dict_data=dictionary).decompress(pack(new, old)) == new


@pytest.mark.parametrize("base", [b"", some(2)])
def test_damaged_frames_are_refused(base: bytes) -> None:
    good = pack(some(1), base)
    for wrong in (b"", good[:-1], good[:20], good + b"x", b"x" + good):
        with pytest.raises(ValueError, match=r"damaged|declare"):
            unpack(wrong, base)


def test_a_frame_that_declares_too_much_is_not_unpacked() -> None:
    assert unpack(pack(bytes(1000)), most=1000) == bytes(1000)
    with pytest.raises(ValueError, match="more than 999"):
        unpack(pack(bytes(1000)), most=999)
    stream = zstandard.ZstdCompressor().compressobj()
    with pytest.raises(ValueError, match="no length"):
        unpack(stream.compress(bytes(1000)) + stream.flush())


def test_names_tell_for_whom_it_was_packed() -> None:
    assert packed_name("targets/a.json") == "targets/a.json.zst"
    assert packed_name("targets/a.json", b"abc") == "targets/a.json.6437b3ac38465133.zst"  # BLAKE3's test vector
