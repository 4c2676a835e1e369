"""The benchmarks run, and say what they are there to say. Their figures are not judged here: this machine is busy."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES
from benchmarks.far import far
from benchmarks.report import Scale, Table
from tests.conftest import Built

TITLES = {
    "scheduling": [
        "Mixed classes at twice the capacity, simulated",
        "One class, 50 ms, device 5 + 0.5 x rows ms, 16 rows, simulated",
        "CPU of the scheduler",
    ],
    "inprocess": ["A call in process over `session.run`"],
    "transports": ["Transports over a bare echo"],
    "offload": ["A photo, with 120 ms to the cloud and back", "Its stages"],
    "int8": ["INT8 against FP32"],
    "push": ["A push, from publish to served"],
    "codec": [
        "Bytes of a difference",
        "Bytes of others",
        "Decoding, by form",
        "Whole files",
        "Peak memory of rebuilding",
    ],
    "idle": ["Idle processes", "Threads of a node before, during and after 200 calls at once"],
    "start": ["Starts"],
}


def test_every_benchmark_is_looked_at_here() -> None:
    assert set(TITLES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_quick_look_fills_its_tables(name: str, bundles: Path, photos: Built) -> None:
    tables = import_module(f"benchmarks.{name}").run(Scale(quick=True, bundles=bundles))
    assert [table.title for table in tables] == TITLES[name]
    for table in tables:
        assert table.rows
        numbers = [cell for row in table.rows for cell in row if isinstance(cell, int | float)]
        assert any(number > 0 for number in numbers)
        if table.title.startswith("Threads"):
            assert all(before == during == after for _, before, during, after, *_ in table.rows)  # none per request


def test_the_command_prints_tables_and_writes_the_same_figures_as_json(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "benchmarks", "inprocess", "--quick", "--json", tmp_path / "figures.json")
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    written = json.loads((tmp_path / "figures.json").read_bytes())
    assert json.loads(printed.splitlines()[-1]) == written
    [table] = written["tables"]
    assert table["benchmark"] == "inprocess"
    assert [row["engine"] for row in table["rows"]] == ["thread", "inline"]
    assert "| thread | " in printed


def test_an_unknown_benchmark_is_refused_with_those_that_exist() -> None:
    done = subprocess.run((sys.executable, "-m", "benchmarks", "inproces"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "inprocess" in done.stderr


def test_a_row_that_does_not_fit_its_table_is_refused() -> None:
    table = Table(title="t", how="h", columns=("a", "b"))
    with pytest.raises(ValueError, match="3 cells for the columns a, b"):
        table.add(1, 2, 3)


async def test_the_far_link_takes_a_round_trip_and_one_more_for_a_new_connection() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, far(f"127.0.0.1:{port}", 0.1) as address:
        started = time.monotonic()
        reader, writer = await asyncio.open_connection(*address.split(":"))
        times = []
        for size in (1, 1, 200_000):
            writer.write(b"x" * size)
            assert await reader.readexactly(size) == b"x" * size
            times.append(time.monotonic() - started)
            started = time.monotonic()
        writer.close()
        await writer.wait_closed()
        await ended.wait()  # the other side hears of it
    assert times[0] >= 0.2  # connect and first answer
    assert times[1] >= 0.1
    assert times[2] < 0.4  # many pieces on the way at once, not one after the other: 13 of 16 KB would take 1.3 s
