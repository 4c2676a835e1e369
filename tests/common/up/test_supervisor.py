import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.up.supervisor import Backoff, Program, Supervisor

QUICK = Backoff(first_s=0.01, longest_s=0.02, settled_s=60.0)


def python(name: str, code: str, folder: Path, *arguments: str, stop_s: float = 10.0, rank: int = 0) -> Program:
    return Program(
        rank=rank, name=name, argv=(sys.executable, "-c", code, *arguments), log=folder / f"{name}.log", stop_s=stop_s
    )


async def until(condition: object, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def sigterm_is_ignored(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
    return bool(mask >> (signal.SIGTERM - 1) & 1)


async def test_a_child_that_dies_is_started_again_with_its_output_kept(tmp_path: Path) -> None:
    notes: list[str] = []
    async with Supervisor(backoff=QUICK, on_note=notes.append) as supervisor:
        await supervisor.start(python("short", "print('born', flush=True); raise SystemExit(3)", tmp_path))
        await until(lambda: supervisor.restarts.get("short", 0) >= 3)
    assert (tmp_path / "short.log").read_text().count("born") >= 3
    assert "exit code 3" in notes[0]


async def test_what_leans_on_others_stops_first_and_none_is_left(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "def stop(*_):\n    open(sys.argv[1], 'a').write(sys.argv[2] + '\\n'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop); print('up', flush=True)\nwhile True: time.sleep(1)"
    )
    order = tmp_path / "order"
    pids = []
    async with Supervisor(backoff=QUICK) as supervisor:
        for rank, name in enumerate(("first", "second", "third")):
            await supervisor.start(python(name, code, tmp_path, str(order), name, rank=rank))
            log = tmp_path / f"{name}.log"
            await until(lambda log=log: "up" in log.read_text())
            pids.append(supervisor.pid(name))
    assert order.read_text().split() == ["third", "second", "first"]
    assert not any(is_alive(pid) for pid in pids if pid)


async def test_a_child_that_ignores_sigterm_is_killed_after_its_bound(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    notes: list[str] = []
    async with Supervisor(on_note=notes.append) as supervisor:
        await supervisor.start(python("stubborn", code, tmp_path, stop_s=0.3))
        await until(lambda: "up" in (tmp_path / "stubborn.log").read_text())
        pid = supervisor.pid("stubborn")
        start = time.monotonic()
    assert pid is not None
    assert not is_alive(pid)
    assert 0.25 < time.monotonic() - start < 5
    assert "is killed" in notes[0]


async def test_a_killed_supervisor_takes_its_children_along_even_deaf_ones(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from pathlib import Path
from common.up.supervisor import Program, Supervisor
async def main():
    async with Supervisor() as supervisor:
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        sleeper = (sys.executable, "-c", deaf)
        await supervisor.start(Program(name="c", argv=sleeper, log=Path({str(tmp_path)!r}) / "c.log"))
        print(supervisor.pid("c"), flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        command = Path(f"/proc/{pid}/cmdline")
        await until(lambda: b"SIG_IGN" in command.read_bytes() and sigterm_is_ignored(pid))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    await until(lambda: not is_alive(pid), 5.0)


async def test_a_child_that_cannot_be_started_again_is_tried_until_it_can(tmp_path: Path) -> None:
    program, away = tmp_path / "program", tmp_path / "away"
    program.write_text("#!/bin/sh\necho born\n")
    program.chmod(0o700)
    notes: list[str] = []
    log = tmp_path / "p.log"
    async with Supervisor(backoff=QUICK, on_note=notes.append) as supervisor:
        await supervisor.start(Program(name="p", argv=(str(program),), log=log))
        program.rename(away)
        await until(lambda: sum("cannot be started" in note for note in notes) >= 2)
        born = log.read_text().count("born")
        away.rename(program)
        await until(lambda: log.read_text().count("born") > born)


async def test_a_log_keeps_within_its_bound_and_the_child_goes_on_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.up.supervisor._LOOK_S", 0.02)
    log, kept = tmp_path / "chatty.log", tmp_path / "chatty.log.1"
    code = "import time\nfor i in range(10**6): print('line', i, flush=True); time.sleep(0.0005)"
    async with Supervisor(max_log_bytes=2000) as supervisor:
        await supervisor.start(python("chatty", code, tmp_path))
        await until(kept.exists)
        first = kept.read_text()
        await until(lambda: kept.read_text() not in ("", first))
        await until(lambda: 0 < log.stat().st_size < 2000)
    assert first.startswith("line 0\n")
    assert "\0" not in log.read_text()  # appended, not written at the old place: no hole
    assert kept.stat().st_size < 200_000


def test_backoff_doubles_up_to_its_limit() -> None:
    backoff = Backoff(first_s=0.25, longest_s=15.0)
    assert [backoff.after(deaths) for deaths in (1, 2, 3, 6, 7, 50)] == [0.25, 0.5, 1.0, 8.0, 15.0, 15.0]
