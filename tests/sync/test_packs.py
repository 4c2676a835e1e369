from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CorruptPack
from sync import codec
from sync.codec import Encoded, Header
from sync.codec.choice import Pair
from sync.deltas import Change, write_pack
from sync.packs import PackWriter, is_sound, max_index_bytes, parse_index
from sync.slabs import slab_id
from tests.sync.indexes import entries_of, manifest_of, patched, signed, with_entries

BASE = manifest_of([("bc" * 32, 16), ("bb" * 32, 64)], content="base")
TARGET = manifest_of([(f"{number:02x}" * 32, 64) for number in range(64)], content="target")


def encoded(number: int, *, form: int = codec.PLANES, size: int = 5, **fields: int) -> Encoded:
    payload = bytes([number]) * size
    header = Header(
        form=form,
        width=4,
        mantissa=23,
        raw_length=64,
        payload_length=size,
        slab=f"{number:02x}" * 32,
        base="bb" * 32,
        payload_hash=codec.payload_hash(payload),
        **fields,
    )
    return Encoded(header=header, payload=payload)


class Tables:
    """Stands for a table set: all that a pack knows of it is its bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def to_bytes(self) -> bytes:
        return self._data


def packed(*slabs: list[Encoded], tables: tuple[bytes, ...] = ()) -> tuple[bytes, bytes]:
    """(pack, index)"""
    file = io.BytesIO()
    with PackWriter(file, base=BASE, target=TARGET, tables=[Tables(one) for one in tables]) as writer:  # type: ignore[misc]
        for forms in slabs:
            writer.add(forms)
        index = writer.finish()
    return file.getvalue(), index or b""


def test_every_range_is_where_the_index_says() -> None:
    slabs = [[encoded(1), encoded(1, size=9)], [], [encoded(2, form=codec.CTX, row=4, tables=1)], [encoded(3)]]
    tables = (b"first", b"second set")
    pack, data = packed(*slabs, tables=tables)
    index = parse_index(data, base=BASE, target=TARGET)
    assert index is not None
    assert [pack[one.offset : one.offset + one.length] for one in index.tables] == list(tables)
    assert [one.digest for one in index.tables] == [codec.payload_hash(one) for one in tables]
    found = [pack[one.offset : one.offset + one.header.payload_length] for one in index.entries]
    assert found == [b"\1" * 5, b"\2" * 5, b"\3" * 5, b"\1" * 9]  # second forms are behind all first ones
    assert [one.header for one in index.entries[:2]] == [slabs[0][0].header, slabs[2][0].header]
    assert is_sound(index, io.BytesIO(pack))
    assert not is_sound(index, io.BytesIO(pack + b"x"))
    assert not is_sound(index, io.BytesIO(pack[:-1]))
    assert not is_sound(index, io.BytesIO(b"x" + pack[1:]))


def test_the_index_is_laid_out_as_documented() -> None:
    one, other = encoded(1, form=codec.CTX, row=7, size=300), encoded(5)
    pack, data = packed([one], [other], tables=(b"tables",))
    assert pack == b"tables" + one.payload + other.payload
    assert data[:20] == b"OPIX" + struct.pack("<HHIQ", 1, 1, 2, len(pack))
    assert data[20:84] == bytes.fromhex(BASE.digest() + TARGET.digest())
    ids = bytes.fromhex("bc" * 32 + "bb" * 32) + b"".join(bytes([number]) * 32 for number in range(64))
    assert data[84:92] == blake3(ids).digest(8)
    assert data[92:104] == struct.pack("<I", 6) + blake3(b"tables").digest(8)
    first = struct.pack("<IiIIBB", 1, 0, 7, 300, codec.CTX, 0) + blake3(one.payload).digest(8)
    second = struct.pack("<IiIIBB", 3, -4, 0, 5, codec.PLANES, 0) + blake3(other.payload).digest(8)
    assert entries_of(data, 1) == [first, second]
    assert data[-8:] == blake3(data[:-8]).digest(8)


def test_an_empty_pack_has_no_index() -> None:
    assert packed([], [], tables=(b"tables",))[1] == b""


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_in_an_index_is_refused(at: int, bit: int) -> None:
    _, good = packed([encoded(1)], [encoded(2)], tables=(b"tables",))
    data = bytearray(good)
    data[at % len(data)] ^= 1 << bit
    with contextlib.suppress(CorruptPack):
        assert parse_index(bytes(data), base=BASE, target=TARGET) is None
        assert 4 <= at % len(data) < 6  # another format


@given(data=st.binary(max_size=300), keep=st.integers(0, 220))
def test_a_hostile_index_is_refused(data: bytes, keep: int) -> None:
    """Whoever makes an index can also hash it: what it says is checked all the same."""
    _, good = packed([encoded(1)], tables=(b"tables",))
    with contextlib.suppress(CorruptPack):
        parsed = parse_index(signed(good[:keep] + data + bytes(8)), base=BASE, target=TARGET)
        assert parsed is None or len(parsed.entries) == struct.unpack_from("<I", good[:keep] + data, 8)[0]


@given(entries=st.lists(st.binary(min_size=26, max_size=26), min_size=1, max_size=4))
def test_hostile_entries_are_refused(entries: list[bytes]) -> None:
    _, good = packed([encoded(1)], tables=(b"tables",))
    length = 6 + sum(struct.unpack_from("<I", entry, 12)[0] for entry in entries)
    index = patched(with_entries(good, *entries), 12, struct.pack("<Q", length))
    with contextlib.suppress(CorruptPack):
        parsed = parse_index(index, base=BASE, target=TARGET)
        assert parsed is not None
        assert {one.header.base for one in parsed.entries} <= {"bb" * 32}  # the only one of that length
        assert {one.header.slab for one in parsed.entries} <= TARGET.slabs().keys()


@pytest.mark.parametrize(
    ("at", "data", "problem"),
    [
        (6, struct.pack("<H", 0), "entries"),
        (6, struct.pack("<H", 257), "table sets"),
        (8, struct.pack("<I", 3), "another length than 78..78"),
        (8, struct.pack("<I", 0), "another length than 0..0"),
        (8, struct.pack("<I", 1 << 31), "table sets and 2147483648 entries"),
        (12, struct.pack("<Q", 17), "the pack 17"),
        (20, bytes(32), "its index is from"),
        (84, bytes(8), "other manifests"),
        (92, struct.pack("<I", 0), "bytes"),
        (104, b"x", "damaged"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(at: int, data: bytes, problem: str) -> None:
    _, good = packed([encoded(1, form=codec.CTX, row=4)], tables=(b"tables",))
    assert parse_index(good, base=BASE, target=TARGET) is not None
    with pytest.raises(CorruptPack, match=problem):
        parse_index(patched(good, at, data), base=BASE, target=TARGET)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tables": 1}, "table set that is not there"),
        ({"form": codec.SPARSE}, "rows of 4 elements"),
        ({"form": codec.FULL, "row": 0}, "in form full"),
        ({"form": codec.SAME, "row": 0}, "in form same"),
        ({"row": 0}, "rows of 0 elements"),
        ({"slab": 64}, "slab 64 of 64"),
        ({"base": 1}, "2 of 2 in the base"),
        ({"base": -1}, "its base has 16 bytes"),
        ({"length": 1 << 30}, "malformed"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(changes: dict[str, int], problem: str) -> None:
    one = encoded(1, form=codec.CTX, row=4)
    _, good = packed([one], tables=(b"tables",))
    fields = {"slab": 1, "base": 0, "row": 4, "length": 5, "form": codec.CTX, "tables": 0} | changes
    entry = struct.pack("<IiIIBB", *fields.values()) + one.header.payload_hash
    index = patched(with_entries(good, entry), 12, struct.pack("<Q", 6 + fields["length"]))
    with pytest.raises(CorruptPack, match=problem):
        parse_index(index, base=BASE, target=TARGET)


def test_more_entries_than_any_writer_makes_are_refused() -> None:
    _, good = packed([encoded(1)], tables=(b"tables",))
    entry = struct.pack("<IiIIBB", 0xFFFFFFFF, 1, 0, 5, codec.PLANES, 0) + bytes(8)
    most = 8 * 64
    for count, problem in ((most + 1, "513 entries for 64 slabs"), (most, "speaks of slab 4294967295 of 64")):
        index = patched(with_entries(good, *[entry] * count), 12, struct.pack("<Q", 6 + 5 * count))
        with pytest.raises(CorruptPack, match=problem):
            parse_index(index, base=BASE, target=TARGET)


def test_an_index_over_the_same_releases_cut_otherwise_is_not_used() -> None:
    _, good = packed([encoded(1)])
    other = manifest_of([(slab, one.length) for slab, one in reversed(TARGET.slabs().items())], content="target")
    assert other.digest() == TARGET.digest()
    with pytest.raises(CorruptPack, match="other manifests"):
        parse_index(good, base=BASE, target=other)


def test_a_table_set_without_bytes_or_with_too_many_is_refused() -> None:
    for size in (0, 65_537):
        _, data = packed([encoded(1)], tables=(bytes(size),))
        with pytest.raises(CorruptPack, match="table set"):
            parse_index(data, base=BASE, target=TARGET)


def test_an_index_of_a_later_format_is_not_read_and_no_error() -> None:
    _, good = packed([encoded(1)])
    assert parse_index(patched(good, 4, b"\2\0"), base=BASE, target=TARGET) is None


def test_a_later_form_among_the_entries_is_kept_with_its_place() -> None:
    later = encoded(1, form=77, tables=9, row=3)
    pack, data = packed([later], [encoded(2)])
    index = parse_index(data, base=BASE, target=TARGET)
    assert index is not None
    assert [one.header.form for one in index.entries] == [77, codec.PLANES]
    assert pack[index.entries[1].offset :] == b"\2" * 5


def test_an_index_longer_than_any_that_the_release_could_have_is_not_wanted() -> None:
    _, data = packed(*([encoded(number)] for number in range(40)))
    assert len(data) < max_index_bytes(40) < 100_000
    assert max_index_bytes(1 << 40) == 64 << 20


def test_what_is_encoded_is_what_the_pack_gives_back(tmp_path: Path) -> None:
    """Several slabs of two kinds, with table sets where the codec makes some."""
    rng = np.random.default_rng(0)
    found: list[tuple[bytes, bytes]] = []
    for dtype, scale in ((np.float32, 1e-4), (np.int8, 0.4)):
        for _ in range(3):
            base = (rng.normal(size=4096) * 50).astype(dtype)
            step = rng.normal(size=4096, scale=scale)
            new = base + (step if dtype == np.float32 else np.rint(step))
            found.append((new.astype(dtype).tobytes(), base.tobytes()))

    kinds = [(4, 23)] * 3 + [(1, 0)] * 3

    def changes() -> Iterator[Change]:
        for (raw, base), (width, mantissa) in zip(found, kinds, strict=True):
            pair = Pair(raw=raw, base=base, base_id=slab_id(base), row=256, width=width, mantissa=mantissa)
            yield Change(pair=pair, full_bytes=len(raw))

    new, old = (manifest_of([(slab_id(pair[at]), len(pair[at])) for pair in found], kinds=kinds) for at in (0, 1))
    with (tmp_path / "pack").open("w+b") as file:
        data = write_pack(file, changes, base=old, target=new, folder=tmp_path)
        assert data is not None
        index = parse_index(data, base=old, target=new)
        assert index is not None
        file.seek(0)
        pack = file.read()
    tables = [codec.parse_tables(pack[one.offset : one.offset + one.length]) for one in index.tables]
    decoded = set()
    bases = {slab_id(base): base for _, base in found}
    for entry in index.entries:
        header, at = entry.header, entry.offset
        set_ = tables[header.tables] if header.form == codec.CTX else None
        payload = pack[at : at + header.payload_length]
        decoded.add(codec.decode(header, payload, base=bases[header.base or ""], tables=set_))
    assert decoded == {raw for raw, _ in found}
