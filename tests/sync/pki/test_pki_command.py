from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from common.cli import main
from sync.agent.running import SyncOptions
from sync.pki.identity import Identity
from sync.service import ServiceConfig, enrolling


def run(*args: str | Path) -> int:
    return main([str(arg) for arg in args])


async def test_from_a_ca_to_an_enrolled_device_and_its_revocation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ca, token = tmp_path / "ca", tmp_path / "token"
    assert run("sync", "ca", "init", "--ca", ca) == 0
    assert run("sync", "ca", "init", "--ca", ca, "--if-absent") == 0
    assert run("sync", "ca", "init", "--ca", ca) == 2
    assert run("sync", "ca", "token", "edge-a", "--ca", ca, "--ttl", "30m", "--out", token) == 0
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert run("sync", "ca", "token", "edge-a", "--ca", ca, "--out", token) == 2  # never over a file that is there
    secret = token.read_text().strip()
    said = capsys.readouterr()
    assert secret not in said.out + said.err
    assert run("sync", "ca", "token", "edge-b", "--ca", ca) == 0
    assert capsys.readouterr().out.startswith("outrider-enrol-")

    config = ServiceConfig(store=str(tmp_path / "store"), ca=str(ca), enrol_port=0)
    async with enrolling(config) as address:
        assert address is not None
        flags = ("--service", address, "--node", "edge-a", "--identity", tmp_path / "id", "--token-file", token)
        os.chmod(token, 0o644)
        assert await asyncio.to_thread(run, "sync", "enrol", *flags, "--ca-cert", ca / "ca.pem") == 2
        os.chmod(token, 0o600)
        assert await asyncio.to_thread(run, "sync", "enrol", *flags, "--ca-cert", ca / "none.pem") == 2
        assert await asyncio.to_thread(run, "sync", "enrol", *flags, "--ca-cert", ca / "ca.pem") == 0
    assert Identity(tmp_path / "id").current().facts.name == "edge-a"
    assert run("sync", "ca", "mosquitto", "--ca", ca, "--out", tmp_path / "mq", "--dns", "mq.example") == 0
    assert run("sync", "ca", "revoke", "edge-a", "--ca", ca) == 0
    said = capsys.readouterr()
    assert str(tmp_path / "mq" / "crl.pem") in said.err
    assert secret not in said.out + said.err
    assert run("sync", "ca", "revoke", "nobody", "--ca", ca) != 0
    assert run("sync", "ca", "token", "edge-c", "--ca", tmp_path / "none") == 2


def test_a_plain_service_for_other_machines_has_to_be_asked_for() -> None:
    with pytest.raises(ValueError, match="there is no TLS"):
        ServiceConfig(store="s", host="0.0.0.0")
    assert ServiceConfig(store="s", host="0.0.0.0", insecure=True)
    assert ServiceConfig(store="s", host="0.0.0.0", ca="ca")
    assert ServiceConfig(store="s", host="::1")


def test_settings_of_tls_are_checked() -> None:
    for wrong in (
        {"enrol_port": 1},
        {"dns": ("a",)},
        {"ca": "c", "certificate_days": 0.0},
        {"ca": "c", "enrol_port": -1},
    ):
        with pytest.raises(ValueError, match=r"ca|certificate_days|enrol_port"):
            ServiceConfig(store="s", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="identity"):
        SyncOptions(source="s:1", root="r", ca="ca.pem")
    with pytest.raises(ValueError, match="host:port"):
        SyncOptions(source="https://store.example", root="r", identity="id")
    assert SyncOptions(source="s:1", root="r", identity="id", ca="ca.pem")
