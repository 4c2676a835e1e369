"""`outrider cloud gateway` as a process: its endpoint file, its probes, its end."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from cloud.command import register
from tests.cloud.fakes import fake_worker

RUN = """
import argparse, sys
from cloud.command import register
parser = argparse.ArgumentParser()
register(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
sys.exit(args.run(args))
"""
SLOW = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}


def test_both_processes_are_commands() -> None:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    for name in ("gateway", "worker"):
        args = parser.parse_args(["cloud", name, "--config", "x.toml", "--log", "json", "--endpoint-file", "e.json"])
        assert (args.config, args.log, args.endpoint_file) == (Path("x.toml"), "json", Path("e.json"))
        assert callable(args.run)


def test_the_command_line_is_cheap_to_load() -> None:
    code = """
import argparse, sys
import cloud.command
cloud.command.register(argparse.ArgumentParser().add_subparsers())
print([m for m in ("aiohttp", "grpc", "numpy", "torch") if m in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


@pytest.mark.system
async def test_sigterm_answers_what_is_in_progress_and_exits_zero(tmp_path: Path) -> None:
    async with fake_worker("w1") as worker, aiohttp.ClientSession() as session:
        config, endpoint = tmp_path / "gateway.toml", tmp_path / "endpoint.json"
        config.write_text(f'workers = ["{worker.address}"]\ndrain_s = 5\n[server]\nhttp_port = 0\n')
        command = [sys.executable, "-c", RUN, "cloud", "gateway", "--config", str(config), "--log", "json"]
        with subprocess.Popen([*command, "--endpoint-file", str(endpoint)], stderr=subprocess.PIPE) as process:
            try:
                async with asyncio.timeout(20):
                    while not endpoint.exists():
                        await asyncio.sleep(0.02)
                said = json.loads(endpoint.read_text())
                assert (said["name"], said["kind"], said["pid"]) == ("gateway", "gateway", process.pid)
                assert said["grpc"] is None
                headers = {"x-outrider-deadline-ms": "800"}
                call = asyncio.create_task(
                    session.post(f"{said['http']}/v2/models/slow/infer", json=SLOW, headers=headers)
                )
                await worker.target.started.wait()
                process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
                async with session.get(f"{said['http']}/v2/health/ready") as reply:
                    assert reply.status == 503
                async with await call as reply:
                    assert reply.status == 503  # answered at its deadline, not cut off
                start = time.monotonic()
                assert await asyncio.to_thread(process.wait, 10) == 0
                assert time.monotonic() - start < 3
            finally:
                process.kill()
            assert process.stderr is not None
            lines = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert "worker is healthy" in [line["message"] for line in lines]
    assert not [line for line in lines if line["level"] == "error"]
