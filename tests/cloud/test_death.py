"""A worker process that stops answering without closing anything. (Killed ones: tests/cases, case 27.)"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from cloud.config import GatewayConfig
from cloud.gateway import Gateway
from common.request import Request
from common.transport.grpc_client import OipClient
from common.transport.servers import ServerOptions
from tests.cloud.fakes import free_port

X = np.ones((1, 2), dtype=np.float32)


@contextmanager
def worker_process(name: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.cloud.fakes", name, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"serving\n"
            yield process
        finally:
            process.kill()


@pytest.mark.system
async def test_a_worker_that_falls_silent_on_an_open_connection_is_found_out() -> None:
    """A stopped process accepts and answers nothing; calls without a deadline must not wait for it for ever."""
    with worker_process("w0", first := free_port()) as silent, worker_process("w1", second := free_port()):
        config = GatewayConfig(workers=(f"127.0.0.1:{first}", f"127.0.0.1:{second}"), server=ServerOptions(grpc_port=0))
        async with Gateway(config) as gateway, OipClient(str(gateway.endpoint()["grpc"])) as client:
            request = Request(model="double", inputs={"x": X})
            assert {(await client.infer(request)).stamp.by for _ in range(50)} == {"w0", "w1"}
            silent.send_signal(signal.SIGSTOP)
            try:
                calls = [asyncio.create_task(client.infer(request)) for _ in range(20)]
                async with asyncio.timeout(15):
                    answers = await asyncio.gather(*calls)
            finally:
                silent.send_signal(signal.SIGCONT)
    assert {answer.stamp.by for answer in answers} == {"w1"}
