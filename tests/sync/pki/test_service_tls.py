"""The sync service and its callers over real sockets, with certificates good and bad."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import numpy as np
import pytest

from common.errors import EavesdropRefused, FetchError, IdentityRefused
from sync.agent.client import GrpcSource
from sync.agent.ports import Range
from sync.pki.authority import Authority
from sync.pki.certificates import new_key, new_request
from sync.pki.channel import CertifiedDialer, enrol, renew
from sync.pki.identity import Credentials, Identity
from sync.proto import sync_pb2, sync_pb2_grpc
from sync.service import ServiceConfig, enrolling, service
from sync.store import TIMESTAMP, object_name
from tests.sync.fakes import FakeClock, FakeInstaller, World, running, weights
from tests.sync.pki.devices import enrolled

SECRET = b"a secret that nobody else may read " * 40
ID = "dd" * 32


@pytest.fixture
def config(world: World, authority: Authority) -> ServiceConfig:
    world.store.put_full(ID, SECRET)
    return ServiceConfig(store=str(world.store.root), ca=str(authority.folder))


@pytest.fixture
def device(authority: Authority, tmp_path: Path) -> Identity:
    return enrolled(authority, tmp_path / "edge-a", "edge-a")


class Shown:
    """An identity that never changes."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def current(self) -> Credentials:
        return self._credentials


@contextlib.contextmanager
def source(address: str, identity: Identity | Shown | None) -> Iterator[GrpcSource]:
    dialer = None if identity is None else CertifiedDialer(identity)
    one = GrpcSource(address, timeout_s=20, dialer=dialer)
    try:
        yield one
    finally:
        one.close()


def refusal(address: str, identity: Identity | None) -> FetchError:
    """What a caller hears, to metadata and to slabs alike; it gets nothing of either."""
    with source(address, identity) as one:
        with pytest.raises(FetchError) as caught:
            list(one.fetch([Range(name=object_name(ID), limit=len(SECRET))]))
        with pytest.raises(FetchError):
            list(one.read(TIMESTAMP))
    assert not caught.value.is_permanent  # a new enrolment mends it
    return caught.value


def test_a_node_with_a_certificate_gets_what_it_asks_for(
    world: World, config: ServiceConfig, device: Identity, installer: FakeInstaller
) -> None:
    world.publish(weights())
    with running(config) as address, source(address, device) as one:
        agent = world.agent(installer, source=one)
        assert agent.run_once()
        agent.close()
    assert installer.serving == {"digits": "1"}


def test_callers_without_a_certificate_that_counts_get_nothing(
    config: ServiceConfig, authority: Authority, device: Identity, tmp_path: Path
) -> None:
    past = FakeClock()
    past.advance(days=-8)
    expired = enrolled(Authority(authority.folder, clock=past), tmp_path / "late", "edge-late")
    stranger = enrolled(Authority.create(tmp_path / "other-ca"), tmp_path / "strange", "edge-a")
    believing = Identity(stranger.folder, authority.root_file)  # its certificate is another CA's, it knows our root
    with running(config) as address:
        refusal(address, None)  # plain gRPC
        assert "UNAVAILABLE" in str(refusal(address, expired))
        refusal(address, believing)
        nothing_shown = grpc.ssl_channel_credentials(authority.root)
        with grpc.secure_channel(address, nothing_shown) as channel, pytest.raises(grpc.RpcError) as caught:
            list(sync_pb2_grpc.SyncStub(channel).Metadata(sync_pb2.MetadataRequest(name=TIMESTAMP), timeout=20))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with source(address, device) as one:
            assert list(one.fetch([Range(name=object_name(ID), limit=len(SECRET))])) == [SECRET]


def test_a_revoked_certificate_is_refused_within_seconds_on_an_open_connection(
    config: ServiceConfig, authority: Authority, device: Identity, tmp_path: Path
) -> None:
    other = enrolled(authority, tmp_path / "edge-b", "edge-b")
    with running(config) as address, source(address, device) as one:
        assert list(one.fetch([Range(name=object_name(ID), limit=len(SECRET))])) == [SECRET]
        authority.revoke("edge-a")
        with pytest.raises(FetchError, match=r"UNAUTHENTICATED.*revoked"):
            asked_until_refused(one)
        with pytest.raises(IdentityRefused, match="revoked"):
            renew(device, address)
        with source(address, other) as still:
            assert list(still.fetch([Range(name=object_name(ID), limit=len(SECRET))])) == [SECRET]


def test_a_node_does_not_get_another_ones_certificate(
    config: ServiceConfig, authority: Authority, device: Identity
) -> None:
    shown = device.current()
    credentials = grpc.ssl_channel_credentials(shown.roots, shown.pem, shown.pem)
    with running(config) as address, grpc.secure_channel(address, credentials) as channel:
        request = sync_pb2.RenewRequest(request=new_request(new_key(), "edge-b"))
        with pytest.raises(grpc.RpcError) as caught:
            sync_pb2_grpc.SyncStub(channel).Renew(request, timeout=20)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_renewed_certificate_takes_over_without_a_restart(
    config: ServiceConfig, authority: Authority, device: Identity
) -> None:
    old = device.current()
    with running(config) as address, source(address, device) as one:
        assert list(one.fetch([Range(name=object_name(ID), limit=len(SECRET))])) == [SECRET]
        facts = renew(device, address)
        assert facts.serial != old.facts.serial
        assert facts.ends >= old.facts.ends
        key = old.pem[: old.pem.index(b"-----BEGIN CERT")]
        assert key not in device.current().pem  # a new key, too
        authority.revoke(old.facts.serial)
        with source(address, Shown(old)) as stale, pytest.raises(FetchError, match="revoked"):
            asked_until_refused(stale)
        assert list(one.fetch([Range(name=object_name(ID), limit=len(SECRET))])) == [SECRET]


def test_a_plain_service_issues_nothing(world: World) -> None:
    with running(ServiceConfig(store=str(world.store.root))) as address, grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            sync_pb2_grpc.SyncStub(channel).Renew(sync_pb2.RenewRequest(request=b"x"), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_device_enrols_with_its_token_and_then_fetches(
    config: ServiceConfig, authority: Authority, tmp_path: Path
) -> None:
    config = dataclasses.replace(config, enrol_port=0)
    token, folder = authority.new_token("edge-c"), tmp_path / "edge-c"
    async with service(config) as address, enrolling(config) as port:
        assert port is not None
        with pytest.raises(IdentityRefused, match="another name"):
            await asyncio.to_thread(enrol, port, "edge-d", token, tmp_path / "edge-d", authority.root)
        strangers = Authority.create(tmp_path / "other-ca")
        with pytest.raises(EavesdropRefused):
            await asyncio.to_thread(enrol, port, "edge-c", token, folder, strangers.root)
        facts = await asyncio.to_thread(enrol, port, "edge-c", token, folder, authority.root)
        assert facts.name == "edge-c"
        assert {path.name for path in folder.iterdir()} == {"identity.pem", "ca.pem"}
        with pytest.raises(IdentityRefused, match="used before"):
            await asyncio.to_thread(enrol, port, "edge-c", token, tmp_path / "thief", authority.root)
        with source(address, Identity(folder)) as one:
            slabs = await asyncio.to_thread(lambda: list(one.fetch([Range(name=object_name(ID), limit=len(SECRET))])))
        assert slabs == [SECRET]
        with source(port, Identity(folder)) as one, pytest.raises(FetchError, match="UNIMPLEMENTED"):
            await asyncio.to_thread(lambda: list(one.read(TIMESTAMP)))  # nothing else is to be had there


def asked_until_refused(one: GrpcSource, within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        list(one.fetch([Range(name=object_name(ID), limit=len(SECRET))]))
        time.sleep(0.01)


class Tap:
    """A TCP proxy that keeps what passes."""

    def __init__(self, target: str) -> None:
        self.host, _, port = target.rpartition(":")
        self.port, self.heard = int(port), bytearray()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up = await asyncio.open_connection(self.host, self.port)
        await asyncio.gather(self._pump(reader, up), self._pump(up_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                self.heard += data
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def tapped(target: str) -> AsyncIterator[tuple[str, Tap]]:
    tap = Tap(target)
    server = await asyncio.start_server(tap.serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", tap
    finally:
        server.close()


@pytest.mark.parametrize("is_certified", [True, False])
async def test_attack_eavesdrop_sees_nothing_of_metadata_and_slabs(
    world: World, config: ServiceConfig, device: Identity, is_certified: bool
) -> None:
    noise = np.random.default_rng(0).bytes(4096)  # no compression hides it
    world.store.replace("targets/releases/a/secret.json", noise)
    config = config if is_certified else ServiceConfig(store=config.store)
    async with service(config, drain_s=0.2) as address, tapped(address) as (through, tap):
        with source(through, device if is_certified else None) as one:
            read = await asyncio.to_thread(lambda: b"".join(one.read("targets/releases/a/secret.json")))
            slabs = await asyncio.to_thread(lambda: list(one.fetch([Range(name=object_name(ID), limit=len(SECRET))])))
    assert (read, slabs) == (noise, [SECRET])
    assert len(tap.heard) > len(noise) + len(SECRET)
    for said in (noise[:64], SECRET[:30], object_name(ID).encode(), b"secret.json"):
        assert (said in tap.heard) is not is_certified, said  # without TLS everything is there to read


class Listening(sync_pb2_grpc.SyncServicer):
    """Somebody who plays the service and waits for nodes to talk."""

    def __init__(self) -> None:
        self.calls = 0

    def Metadata(self, request: sync_pb2.MetadataRequest, context: object) -> Iterator[sync_pb2.MetadataChunk]:  # noqa: N802
        self.calls += 1
        yield sync_pb2.MetadataChunk(data=b"believe me")


@pytest.mark.parametrize("who", ["his own CA", "an enrolled node", "another host"])
def test_attack_eavesdrop_in_the_middle_is_refused_and_the_error_names_it(
    authority: Authority, device: Identity, tmp_path: Path, who: str
) -> None:
    if who == "his own CA":
        pem = (Authority.create(tmp_path / "his-ca").server("sync", ("127.0.0.1",)) / "identity.pem").read_bytes()
    elif who == "an enrolled node":
        pem = enrolled(authority, tmp_path / "127.0.0.1", "127.0.0.1").current().pem
    else:
        pem = (authority.server("sync", ("10.0.0.9",)) / "identity.pem").read_bytes()
    server = grpc.server(futures.ThreadPoolExecutor(1), options=(("grpc.so_reuseport", 0),))
    listening = Listening()
    sync_pb2_grpc.add_SyncServicer_to_server(listening, server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(pem, pem)]))
    server.start()
    try:
        with source(f"127.0.0.1:{port}", device) as one, pytest.raises(EavesdropRefused, match="eavesdrop") as caught:
            list(one.read(TIMESTAMP))
        assert caught.value.attack == "eavesdrop"
        assert not caught.value.is_permanent
    finally:
        server.stop(0).wait()
    assert listening.calls == 0


def test_a_certificate_out_of_its_time_is_no_eavesdropper(authority: Authority, device: Identity) -> None:
    future = FakeClock()
    future.advance(days=2)
    pem = (Authority(authority.folder, clock=future).server("sync", ("127.0.0.1",)) / "identity.pem").read_bytes()
    server = grpc.server(futures.ThreadPoolExecutor(1), options=(("grpc.so_reuseport", 0),))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(pem, pem)]))
    server.start()
    try:
        with source(f"127.0.0.1:{port}", device) as one, pytest.raises(FetchError) as caught:
            list(one.read(TIMESTAMP))
        assert not isinstance(caught.value, EavesdropRefused)
    finally:
        server.stop(0).wait()


def test_the_services_own_certificate_is_replaced_while_it_runs(
    config: ServiceConfig, authority: Authority, device: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ssl

    def shown(address: str) -> str:
        host, _, port = address.rpartition(":")
        return ssl.get_server_certificate((host, int(port)), timeout=20)

    monkeypatch.setattr("sync.pki.door._LOOK_S", 0.0)
    with running(config) as address:
        first = shown(address)
        assert shown(address) == first
        (authority.folder / "servers" / "outrider-sync" / "identity.pem").unlink()
        assert shown(address) != first
        with source(address, device) as one:
            assert list(one.fetch([Range(name=object_name(ID), limit=len(SECRET))])) == [SECRET]
