"""What somebody planted in the cache's database, or did to its file: refused, removed, never run, never served."""

import hashlib
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from edge.disk_rows import MAX_ANSWER_BYTES
from tests.edge.caches import REQUEST, Fixture, answer, read, store

COLUMNS = "key, raw, store_time, expire_time, access_time, tag, size, mode, filename, value"


@pytest.fixture
def fixture(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path / "cache")


def hostile_pickle(marker: Path) -> bytes:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    return pickle.dumps(Hostile())


def forged(value: bytes, **changes: object) -> bytes:
    """A row with another header, under a digest that is right again."""
    (length,) = struct.unpack_from("<I", value, 36)
    header = json.loads(value[40 : 40 + length]) | changes
    text = json.dumps(header).encode()
    body = struct.pack("<I", len(text)) + text + value[40 + length :]
    return b"OAC3" + hashlib.sha256(body).digest() + body


PLANTS = {
    "no answer": "UPDATE Cache SET value = x'00112233445566778899'",
    "one byte short": "UPDATE Cache SET value = substr(value, 1, length(value) - 1)",
    "a pickle": "UPDATE Cache SET mode = 4, value = ?",
    "a file of bytes": "UPDATE Cache SET mode = 2, filename = '../../outside', value = NULL",
    "a file of text": "UPDATE Cache SET mode = 3, filename = '/etc/passwd', value = NULL",
    "a file of a pickle": "UPDATE Cache SET mode = 4, filename = '../../outside', value = NULL",
    "raw, with a file": "UPDATE Cache SET filename = '../../outside'",
    "text": "UPDATE Cache SET value = 'text'",
    "nothing": "UPDATE Cache SET value = NULL",
    "too large": f"UPDATE Cache SET value = zeroblob({MAX_ANSWER_BYTES + 1})",
}


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("plant", PLANTS)
async def test_a_planted_row_is_a_miss_is_removed_and_runs_nothing(
    fixture: Fixture, plant: str, is_open: bool, tmp_path: Path
) -> None:
    outside, marker = tmp_path / "outside", tmp_path / "pickle-ran"
    pickled = hostile_pickle(marker)
    outside.write_bytes(pickled)
    values = [pickled] if "?" in PLANTS[plant] else []
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer())
        if is_open:
            fixture.sql(PLANTS[plant], *values)
            assert await read(cache) is None
            assert fixture.rows() == 0
    if not is_open:
        fixture.sql(PLANTS[plant], *values)
    async with fixture.cache() as cache:
        assert await read(cache) is None
        assert fixture.rows() == 0
        assert len(fixture.faults) == 1
        await store(cache, REQUEST, answer())
        assert await read(cache) is not None
    assert not marker.exists()
    assert outside.read_bytes() == pickled


async def test_rows_that_nobody_asks_for_are_removed_as_well(fixture: Fixture, tmp_path: Path) -> None:
    outside, marker = tmp_path / "outside", tmp_path / "pickle-ran"
    outside.write_bytes(b"secret")
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer())
    pickled = hostile_pickle(marker)
    for row in (
        ("k1", 1, 0, None, 0, None, 0, 4, None, pickled),
        (pickled, 0, 0, None, 0, None, 0, 1, None, b"value"),
        ("k2", 1, 0, None, 0, None, 0, 2, "../../outside", None),
        ("k3", 1, 0, 1.0, 0, None, 0, 2, "../../outside", None),  # expired: the library would delete the file
        ("k4", 1, 0, None, 0, None, 1 << 60, 1, None, b"value"),  # its size would use up the quota
        (7, 1, 0, None, 0, None, 0, 1, None, b"value"),
    ):
        fixture.sql(f"INSERT INTO Cache ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", *row)
    async with fixture.cache() as cache:
        assert fixture.rows() == 1
        assert await read(cache) is not None
        assert ["6 rows" in fault.problem for fault in fixture.faults] == [True]
    assert outside.read_bytes() == b"secret"
    assert not marker.exists()


@pytest.mark.parametrize(
    "changes", [{"version": "2"}, {"identity": "x"}, {"model": "triple"}, {"key": "0" * 64}, {"tensors": [7]}]
)
async def test_a_row_of_another_version_model_or_request_is_refused_whatever_its_digest(
    fixture: Fixture, changes: dict[str, object]
) -> None:
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer())
        [(value,)] = fixture.sql("SELECT value FROM Cache")
        fixture.sql("UPDATE Cache SET value = ?", forged(value))
        assert await read(cache) is not None  # the forger knows the form
        fixture.sql("UPDATE Cache SET value = ?", forged(value, **changes))
        assert await read(cache) is None
    assert fixture.rows() == 0


async def test_a_row_moved_under_another_key_is_not_served(fixture: Fixture) -> None:
    other = structs.replace(REQUEST, classes=2)
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer())
        await store(cache, other, answer(y=9.0))
        [(first, a), (second, b)] = fixture.sql("SELECT rowid, value FROM Cache ORDER BY rowid")
        fixture.sql("UPDATE Cache SET value = ? WHERE rowid = ?", b, first)
        fixture.sql("UPDATE Cache SET value = ? WHERE rowid = ?", a, second)
        assert await read(cache) is None
        assert await read(cache, other) is None


async def test_settings_and_triggers_of_others_have_no_effect(fixture: Fixture) -> None:
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer())
    for key, value in (("set", "x"), ("disk_bomb", 1), ("sqlite_query_only", 1), ("size", 1 << 60)):
        fixture.sql("INSERT OR REPLACE INTO Settings VALUES (?, ?)", key, value)
    fixture.sql("CREATE TRIGGER planted BEFORE INSERT ON Cache BEGIN SELECT RAISE(ABORT, 'no'); END")
    other = structs.replace(REQUEST, classes=2)
    async with fixture.cache() as cache:
        assert await read(cache) is not None
        await store(cache, other, answer())
        assert await read(cache, other) is not None
    assert fixture.faults == []


@pytest.mark.parametrize("damage", ["garbage", "cut short", "another's tables", "a link", "empty"])
async def test_a_damaged_database_is_begun_anew_at_the_start(fixture: Fixture, damage: str, tmp_path: Path) -> None:
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer(columns=50_000))
    file = fixture.folder / "cache.db"
    elsewhere, before = tmp_path / "elsewhere", file.read_bytes()
    match damage:
        case "garbage":
            file.write_bytes(os.urandom(100_000))
        case "cut short":
            os.truncate(file, 20_000)
        case "another's tables":
            fixture.sql("CREATE TABLE other (x)")
        case "a link":
            file.rename(elsewhere)  # a database that would do
            file.symlink_to(elsewhere)
        case "empty":
            os.truncate(file, 0)
    async with fixture.cache() as cache:
        assert await read(cache) is None
        await store(cache, REQUEST, answer())
        assert await read(cache) is not None
    assert damage != "a link" or elsewhere.read_bytes() == before


@pytest.mark.parametrize("damage", ["garbage", "no table"])
async def test_a_database_damaged_while_it_is_open_is_begun_anew(fixture: Fixture, damage: str) -> None:
    async with fixture.cache() as cache:
        await store(cache, REQUEST, answer(columns=50_000))
    async with fixture.cache() as cache:
        if damage == "garbage":
            with (fixture.folder / "cache.db").open("r+b") as file:
                file.seek(0)
                file.write(os.urandom(300_000))
        else:
            fixture.sql("DROP TABLE Cache")
        assert await read(cache) is None  # serving goes on
        await store(cache, REQUEST, answer())
        assert await read(cache) is not None
    assert fixture.faults
