"""The embedded broker with certificates: who gets in, who may say and hear what, who is thrown out."""

from __future__ import annotations

import asyncio
import gc
import ssl
from pathlib import Path

import pytest

from common.errors import ConfigError
from sync.broker import broker
from sync.hints import Announcer, Hint, Listener, topic
from sync.pki.authority import SERVICE, Authority
from sync.pki.identity import Identity
from tests.sync.fakes import FakeClock
from tests.sync.pki.devices import enrolled
from tests.sync.pki.mqtt import ACCEPTED, connect, dialled, publish, subscribe
from tests.sync.test_hints import beside, eventually, timestamp

SUBSCRIBED, REFUSED = bytes((0x90, 3, 0, 1, 0)), bytes((0x90, 3, 0, 1, 0x80))


@pytest.fixture
def service(authority: Authority) -> Identity:
    return Identity(authority.server(SERVICE, ("127.0.0.1",)), authority.root_file)


@pytest.fixture
def node(authority: Authority, tmp_path: Path) -> Identity:
    return enrolled(authority, tmp_path / "edge-a", "edge-a", group="north")


async def test_a_node_hears_its_groups_hints_over_tls(authority: Authority, service: Identity, node: Identity) -> None:
    heard: list[Hint] = []
    async with broker(ca=authority.folder) as address:
        announcer = Announcer(address, group="north", spread_ms=3, identity=service)
        listener = Listener(address, heard.append, group="north", identity=node)
        async with beside(announcer.run(), listener.run()):
            announcer.announce(timestamp(7))
            assert await eventually(lambda: heard != [])
    assert set(heard) == {Hint(timestamp_version=7, spread_ms=3)}


async def test_a_node_may_hear_its_group_and_speak_under_its_name_and_nothing_else(
    authority: Authority, service: Identity, node: Identity
) -> None:
    async with broker(ca=authority.folder) as address, dialled(address, service.tls()) as above:
        await above.say(connect(f"{SERVICE}/1"))
        assert await above.hear() == ACCEPTED
        await above.say(publish(topic("south"), b"south's news"))
        await above.say(publish(topic("north"), b"north's news"))
        for hears in (topic("south"), "outrider/node/#"):
            await above.say(subscribe(hears))
            assert await above.hear() == SUBSCRIBED
            await above.answered()  # what was retained
        async with dialled(address, node.tls()) as wire:
            await wire.say(connect("edge-a"))
            assert await wire.hear() == ACCEPTED
            for wrong in (topic("south"), "outrider/hint/+", "#", "outrider/node/#", "outrider/node/+/x", topic("n+")):
                await wire.say(subscribe(wrong))
                assert await wire.hear() == REFUSED, wrong
            await wire.say(subscribe(topic("north")))
            assert await wire.hear() == SUBSCRIBED
            assert b"north's news" in await wire.answered()
            for wrong in (topic("north"), "outrider/node/edge-b/state", "outrider/node/edge-a", "anything"):
                await wire.say(publish(wrong, b"a lie"))
            assert b"a lie" not in await wire.answered()
            await wire.say(publish("outrider/node/edge-a/state", b"the truth"))
            assert b"the truth" in await above.hear()
            assert b"a lie" not in await above.answered()
        async with dialled(address, node.tls()) as wire:  # what was said to others is not on offer to a newcomer
            await wire.say(connect("edge-a"))
            assert await wire.hear() == ACCEPTED
            assert b"south's news" not in await wire.answered()


@pytest.mark.parametrize(
    "hello",
    [
        connect("edge-b"),  # to take over another one's session
        connect("edge-b", clean=False),
        connect("edge-b/1"),
        connect("edge-ax"),
        connect("outrider-sync"),
        connect(""),
        connect("edge-a", will=topic("north")),  # what a broker sends for a client that has died
        connect("edge-a", will="outrider/node/edge-b/state"),
        connect("edge-a").replace(b"MQTT\x04", b"MQTT\x05"),
        b"\x10\x80\x80\x80\x80\x01",
        b"\x10\xff\xff\xff\x7f",
        b"\x10\x05\x00\x40MQT",
        subscribe(topic("north")),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_a_first_packet_that_claims_what_is_not_its_own_is_refused(
    authority: Authority, tmp_path: Path, node: Identity, hello: bytes
) -> None:
    other = enrolled(authority, tmp_path / "edge-b", "edge-b", group="north")
    async with broker(ca=authority.folder) as address, dialled(address, other.tls()) as victim:
        await victim.say(connect("edge-b"))
        assert await victim.hear() == ACCEPTED
        async with dialled(address, node.tls()) as wire:
            await wire.say(hello)
            assert await wire.hear() == bytes((0x20, 2, 0, 5))  # not authorized
            assert await wire.hear() == b""
        await victim.say(subscribe(topic("north")))  # and nobody else's session has suffered
        assert await victim.hear() == SUBSCRIBED


async def test_connections_without_a_certificate_that_counts_are_refused(
    authority: Authority, node: Identity, tmp_path: Path
) -> None:
    past = FakeClock()
    past.advance(days=-8)
    expired = enrolled(Authority(authority.folder, clock=past), tmp_path / "late", "edge-late")
    stranger = enrolled(Authority.create(tmp_path / "other-ca"), tmp_path / "strange", "edge-a")
    revoked = enrolled(authority, tmp_path / "gone", "edge-gone")
    authority.revoke("edge-gone")
    nothing_shown = ssl.create_default_context(cafile=str(authority.root_file))
    contexts = {
        "plain": None,
        "none": nothing_shown,
        "expired": expired.tls(),
        "another CA's": Identity(stranger.folder, authority.root_file).tls(),
        "revoked": revoked.tls(),
    }
    async with broker(ca=authority.folder) as address:
        for what, tls in contexts.items():
            heard = b""
            try:
                async with dialled(address, tls) as wire:
                    await wire.say(connect({"revoked": "edge-gone", "expired": "edge-late"}.get(what, "edge-a")))
                    heard = await wire.hear()
            except ConnectionError:
                pass  # the handshake failed already
            except ssl.SSLError:
                assert what != "revoked"
            assert heard in (b"", bytes((0x20, 2, 0, 5))), what


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # paho leaves closing to the collector
async def test_a_node_does_not_speak_to_a_broker_of_another_ca_and_names_the_attack(
    authority: Authority, node: Identity, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    his = Authority.create(tmp_path / "his-ca")
    async with broker(ca=his.folder) as address:
        with pytest.raises(ssl.SSLCertVerificationError):
            async with dialled(address, node.tls()):
                pass
        async with beside(Listener(address, lambda hint: None, group="north", identity=node).run()):
            assert await eventually(lambda: "eavesdrop attack refused" in caplog.text)
        gc.collect()


async def test_a_listener_of_another_group_says_so_in_the_log(
    authority: Authority, node: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        broker(ca=authority.folder) as address,
        beside(Listener(address, lambda hint: None, group="south", identity=node).run()),
    ):
        assert await eventually(lambda: "keeps the hints on 'outrider/hint/south' from this node" in caplog.text)


async def test_a_revoked_node_is_thrown_out_while_it_is_connected(
    authority: Authority, node: Identity, tmp_path: Path
) -> None:
    other = enrolled(authority, tmp_path / "edge-b", "edge-b", group="north")
    async with (
        broker(ca=authority.folder) as address,
        dialled(address, node.tls()) as wire,
        dialled(address, other.tls()) as still,
    ):
        for one, name in ((wire, "edge-a"), (still, "edge-b")):
            await one.say(connect(name))
            assert await one.hear() == ACCEPTED
        await asyncio.to_thread(authority.revoke, "edge-a")
        assert await wire.hear() == b""  # within seconds, without a word of its own
        await still.say(subscribe(topic("north")))
        assert await still.hear() == SUBSCRIBED


async def test_a_plain_broker_for_other_machines_has_to_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="there is no TLS"):
        async with broker("0.0.0.0"):
            pass
    async with broker("0.0.0.0", is_insecure=True) as address:
        assert address.startswith("0.0.0.0:")
