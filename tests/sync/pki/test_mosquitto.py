"""The generated configuration in a real Mosquitto."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sync.hints import Announcer, Hint, Listener, topic
from sync.pki.authority import SERVICE, Authority
from sync.pki.identity import Identity
from sync.pki.mosquitto import write_mosquitto
from tests.sync.pki.devices import enrolled
from tests.sync.pki.mqtt import ACCEPTED, connect, dialled, publish, subscribe
from tests.sync.test_hints import beside, eventually, timestamp

MOSQUITTO = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")


@contextlib.asynccontextmanager
async def mosquitto(authority: Authority, out: Path) -> AsyncIterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = write_mosquitto(authority, out, host="127.0.0.1", port=port, dns=())
    text = path.read_text()
    if out.owner() == "root":
        path.write_text(text + "user root\n")  # else it becomes a user that cannot read a test's folder
    process = subprocess.Popen([str(MOSQUITTO), "-c", str(path)], stderr=subprocess.DEVNULL)
    try:
        assert await eventually(lambda: is_open(port))
        yield f"127.0.0.1:{port}", process
    finally:
        process.terminate()
        process.wait(10)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def hello(address: str, identity: Identity, client: str) -> bytes:
    try:
        async with dialled(address, identity.tls()) as wire:
            await wire.say(connect(client))
            return await wire.hear()
    except OSError:
        return b""


async def test_mosquitto_lets_in_by_certificate_and_follows_revocations_after_a_reload(
    authority: Authority, tmp_path: Path
) -> None:
    service = Identity(authority.server(SERVICE, ("127.0.0.1",)), authority.root_file)
    node, other = (enrolled(authority, tmp_path / name, name) for name in ("edge-a", "edge-b"))
    stranger = enrolled(Authority.create(tmp_path / "other-ca"), tmp_path / "strange", "edge-a")
    heard: list[Hint] = []
    async with mosquitto(authority, tmp_path / "mosquitto") as (address, process):
        announcer, listener = Announcer(address, identity=service), Listener(address, heard.append, identity=node)
        async with beside(announcer.run(), listener.run()):
            announcer.announce(timestamp(7))
            assert await eventually(lambda: heard != [])
        assert await hello(address, Identity(stranger.folder, authority.root_file), "edge-a") == b""
        with contextlib.suppress(OSError):
            async with dialled(address, ssl.create_default_context(cafile=str(authority.root_file))) as wire:
                await wire.say(connect("edge-a"))
                assert await wire.hear() == b""

        async with dialled(address, service.tls()) as above, dialled(address, node.tls()) as wire:
            for one, name in ((above, "above"), (wire, "edge-a/1")):
                await one.say(connect(name))
                assert await one.hear() == ACCEPTED
            await above.say(subscribe("outrider/#"))
            assert (await above.hear())[:2] == bytes((0x90, 3))
            assert b"timestamp" in await above.answered()
            for wrong in (topic("default"), "outrider/node/edge-b/state"):
                await wire.say(publish(wrong, b"a lie"))
            await wire.say(publish("outrider/node/edge-a/state", b"the truth"))
            await wire.answered()
            said = await above.answered()
            assert b"the truth" in said
            assert b"a lie" not in said

        assert await hello(address, other, "edge-b") == ACCEPTED
        _, lists = authority.revoke("edge-b")
        assert tmp_path / "mosquitto" / "crl.pem" in lists
        assert await hello(address, other, "edge-b") == ACCEPTED  # a reload is needed
        process.send_signal(signal.SIGHUP)

        async def is_refused() -> bool:
            return await hello(address, other, "edge-b") != ACCEPTED

        for _ in range(200):
            if await is_refused():
                break
            await asyncio.sleep(0.02)
        assert await is_refused()
        assert await hello(address, node, "edge-a") == ACCEPTED
