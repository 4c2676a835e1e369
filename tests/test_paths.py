"""README's two reading lists are true: one push and one call enter each listed file at the function named, in order."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp
import pytest

from common.cli import parser
from edge import CacheOptions, Node, NodeConfig, ServerOptions
from sync.agent.running import SyncOptions
from sync.service import ServiceConfig, service

ROOT = Path(__file__).parents[1]
Entry = tuple[str, str]  # file, function


def listed(heading: str) -> list[Entry]:
    """The files of one numbered list in README.md, with the functions where the path enters them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^\d+\. \[`([^`]+)`\]\(\1\) `([^`]+)`", section, re.MULTILINE)


@contextmanager
def recording(wanted: set[Entry]) -> Iterator[list[Entry]]:
    """Which of the wanted functions were entered, in the order of their first call, on any thread."""
    seen: list[Entry] = []
    paths = {str(ROOT / file): file for file, _ in wanted}

    def trace(frame: FrameType, event: str, _arg: Any) -> None:
        file = paths.get(frame.f_code.co_filename)
        if file is not None and event == "call":
            entry = (file, frame.f_code.co_qualname)
            if entry in wanted and entry not in seen:
                seen.append(entry)

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def outrider(*arguments: object) -> int:
    args = parser().parse_args([str(argument) for argument in arguments])
    code: int = args.run(args)
    return code


@pytest.mark.parametrize("heading", ["The request path", "The parameter path"])
def test_each_list_is_short_and_each_file_opens_with_what_it_owns(heading: str) -> None:
    entries = listed(heading)
    assert 4 <= len(entries) <= 8
    for file, function in entries:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.match(r'"""[A-Z`].{40,}?"""', text, re.DOTALL), f"{file} does not open with what it owns"
        assert f"def {function.rpartition('.')[2]}(" in text


async def test_a_push_and_a_call_run_through_the_listed_files_in_order(tmp_path: Path, digits_source: Path) -> None:
    push, request = listed("The parameter path"), listed("The request path")
    source, store, keys = tmp_path / "source", tmp_path / "store", tmp_path / "keys"
    shutil.copytree(digits_source, source)
    where = ("--store", store, "--keys", keys)
    assert outrider("sync", "keys", "init", *where, "--root", tmp_path / "root.json") == 0
    with recording({*push, *request}) as seen:
        async with service(ServiceConfig(store=str(store))) as address:
            config = NodeConfig(
                state_dir=str(tmp_path / "node"),
                server=ServerOptions(http_port=0),
                cache=CacheOptions(enabled=False),
                sync=SyncOptions(source=address, root=str(tmp_path / "root.json"), interval_s=0.2, min_gap_s=0.1),
            )
            async with Node(config) as node, aiohttp.ClientSession() as session:
                base = node.servers.endpoint("", "")["http"]
                assert seen == []
                assert outrider("publish", source / "model.toml", *where) == 0
                await _until_ready(session, base)
                assert [entry for entry in seen if entry in push] == push
                seen.clear()
                tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [0.5] * 64}
                async with session.post(f"{base}/v2/models/digits/infer", json={"inputs": [tensor]}) as response:
                    assert response.status == 200
                    assert response.headers["x-outrider-target"] == "edge"
                assert [entry for entry in seen if entry in request] == request


async def _until_ready(session: aiohttp.ClientSession, base: str) -> None:
    async with asyncio.timeout(30):
        while True:
            async with session.get(f"{base}/v2/models/digits/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)
