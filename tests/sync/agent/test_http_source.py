"""A store's folder behind plain web servers: a real agent on it, and servers that misbehave."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from common.errors import ConfigError, FetchCancelled, FetchError, SlowSource
from sync.agent.http_connection import Endpoint
from sync.agent.http_source import HttpSource
from sync.agent.paced import Pace
from sync.agent.ports import Part, Range
from sync.agent.sources import source_of
from sync.events import SlabsFetched
from sync.store import Store, object_name, pack_name
from tests.sync.fakes import FakeInstaller, World, trained, weights
from tests.sync.web import Behaviour, Site, answer, scripted, static, without_ranges

ID, OTHER = "dd" * 32, "ee" * 32
OBJECT, PACK = object_name(ID), pack_name(ID, OTHER)
WHOLE = Range(name=OBJECT, limit=100)


@contextlib.contextmanager
def source(site: Site, *, timeout_s: float = 10.0, pace: Pace | None = None) -> Iterator[HttpSource]:
    one = HttpSource(site.url, timeout_s=timeout_s, pace=pace)
    with contextlib.closing(one):
        yield one


@pytest.fixture(params=[static, without_ranges])
def served(request: pytest.FixtureRequest) -> Callable[[Path], contextlib.AbstractContextManager[Site]]:
    return request.param  # type: ignore[no-any-return]


# --- servers as they are ---


def test_a_release_and_then_a_delta_arrive_from_a_plain_web_server(
    world: World, installer: FakeInstaller, served: Callable[[Path], contextlib.AbstractContextManager[Site]]
) -> None:
    installer.variants = ("full",)
    world.publish(weights())
    with (
        served(world.store.root) as site,
        world.agent(installer, source=None, address=site.url) as agent,
    ):
        assert agent.run_once(), agent.last_error
        world.publish(trained(weights()))
        assert agent.run_once(), agent.last_error
    assert installer.serving == {"digits": "2"}
    first, second = world.events_of(SlabsFetched)
    assert set(first.bytes_by_form) == {"full"}
    assert "full" not in second.bytes_by_form
    assert sum(second.bytes_by_form.values()) < sum(first.bytes_by_form.values())
    published = (world.folder / "bundle/full/model.safetensors").read_bytes()
    assert (world.folder / "node/models/digits/2/full/model.safetensors").read_bytes() == published


def test_ranges_come_in_their_order_and_what_is_not_there_is_told_for_each(
    tmp_path: Path, served: Callable[[Path], contextlib.AbstractContextManager[Site]]
) -> None:
    store, data = Store(tmp_path), bytes(range(256)) * 3000
    store.put_full(ID, data)
    with store.new_pack(ID, OTHER) as file:
        file.write(b"0123456789")
    ranges = {
        Range(name=OBJECT, limit=len(data)): data,
        Range(name=object_name(OTHER), limit=10): None,
        Range(name=PACK, offset=2, length=3): b"234",
        Range(name=PACK, offset=5, length=1): b"5",
        Range(name=PACK, offset=8, length=3): None,
        Range(name=PACK, offset=100, length=3): None,
        Range(name=pack_name(ID, ID), offset=1, length=3): None,
        Range(name=OBJECT, offset=5, length=len(data) - 5): data[5:],
        Range(name=OBJECT, offset=767_990, limit=len(data)): data[767_990:],
        Range(name=OBJECT, offset=len(data), limit=len(data)): b"",
        Range(name=PACK, offset=9, length=1): b"9",
    }
    with served(tmp_path) as site, source(site) as one:
        assert list(one.fetch(list(ranges))) == list(ranges.values())
        assert list(one.fetch(list(ranges))) == list(ranges.values())


def test_ranges_that_follow_one_another_travel_as_one_over_one_connection(tmp_path: Path) -> None:
    with Store(tmp_path).new_pack(ID, OTHER) as file:
        file.write(bytes(1000))
    parts = [Range(name=PACK, offset=at, length=100) for at in (0, 100, 200, 500)]
    with static(tmp_path) as site, source(site) as one:
        assert [len(data or b"") for data in one.fetch(parts)] == [100] * 4
        list(one.fetch([replace(parts[0], offset=900)]))
        assert [header for _, header in site.asked] == ["bytes=0-299", "bytes=500-599", "bytes=900-999"]
        assert len(site.connections) == 1


def test_of_a_server_without_ranges_no_more_is_read_than_was_asked_for() -> None:
    """It announces an exabyte, and sends for as long as anybody reads."""
    sent = 0

    def endless(head: bytes, connection: socket.socket) -> None:
        nonlocal sent
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000000000\r\n\r\n")
        while True:
            sent += connection.send(bytes(range(250)) * 4)

    parts = [Range(name=PACK, offset=at, length=3) for at in (10, 1000, 250_001)]
    with scripted(endless) as site, source(site) as one:
        assert list(one.fetch(parts)) == [b"\x0a\x0b\x0c", b"\x00\x01\x02", b"\x01\x02\x03"]
        assert len(site.asked) == 1  # what follows comes out of the same answer
    assert sent < 16 << 20  # what the kernel's buffers took included


def test_signed_files_come_in_chunks_and_a_missing_one_is_a_permanent_error(world: World) -> None:
    big = bytes(range(256)) * 2000
    world.store.replace("targets/releases/a/big.json", big)
    with static(world.store.root) as site, source(site) as one:
        chunks = list(one.read("targets/releases/a/big.json"))
        assert b"".join(chunks) == big
        assert len(chunks) > 1
        with pytest.raises(FetchError, match="404 Not Found") as caught:
            list(one.read("metadata/9.root.json"))
        assert caught.value.is_permanent


# --- servers that misbehave ---


def part(start: int, body: bytes, total: int | str = "*") -> Behaviour:
    return answer("206 Partial Content", body, f"Content-Range: bytes {start}-{start + len(body) - 1}/{total}")


@pytest.mark.parametrize(
    ("behaviour", "problem", "is_permanent"),
    [
        (answer("404 Not Found"), "404", True),
        (answer("403 Forbidden"), "403 Forbidden", True),
        (answer("503 Service Unavailable"), "503", False),
        (answer("500 Internal Server Error"), "500", False),
        (answer("429 Too Many Requests"), "429", False),
        (answer("301 Moved", b"", "Location: http://elsewhere.example/x"), "elsewhere.example", True),
        (answer("302 Found", b"", "Location: /x"), "in circles", True),
        (answer("200 OK", b"zip", "Content-Encoding: gzip"), "content-encoding gzip", True),
        (lambda head, connection: connection.sendall(b"garbage\r\n\r\n"), "garbage", False),
    ],
)
def test_what_a_server_refuses_is_told_and_it_is_known_whether_to_try_again(
    behaviour: Behaviour, problem: str, is_permanent: bool
) -> None:
    with scripted(behaviour) as site, source(site) as one:
        with pytest.raises(FetchError, match=problem) as caught:
            list(one.read("metadata/timestamp.json"))
        assert caught.value.is_permanent is is_permanent


@pytest.mark.parametrize(
    "behaviour",
    [
        part(11, b"abcd"),
        part(9, b"abcd"),
        part(10, b"abcdefgh"),
        answer("206 Partial Content", b"abcd"),
        answer("206 Partial Content", b"abcd", "Content-Range: bytes 10-11/99"),
        answer("206 Partial Content", b"abcd", "Content-Type: multipart/byteranges; boundary=x"),
    ],
)
def test_bytes_that_were_not_asked_for_are_not_taken(behaviour: Behaviour) -> None:
    with scripted(behaviour) as site, source(site) as one, pytest.raises(FetchError, match=r"10-13 was asked for"):
        list(one.fetch([Range(name=PACK, offset=10, length=4)]))


@pytest.mark.parametrize("headers", [b"Content-Length: 101\r\n", b"Connection: close\r\n"])
def test_a_whole_file_that_is_longer_than_it_may_be_is_not_read(headers: bytes) -> None:
    def long(head: bytes, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + headers + b"\r\n" + bytes(101))
        raise OSError

    with scripted(long) as site, source(site) as one:
        with pytest.raises(FetchError, match="endless data") as caught:
            list(one.fetch([WHOLE]))
        assert caught.value.is_permanent


def test_what_came_before_the_connection_broke_is_not_lost() -> None:
    def broken(head: bytes, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n" + bytes(20))
        raise OSError

    with scripted(broken) as site, source(site) as one:
        pieces = list[Part]()
        with pytest.raises(FetchError, match="ended early") as caught:
            pieces.extend(one.stream([WHOLE]))
        assert sum(len(piece.data) for piece in pieces) == 20
        with pytest.raises(FetchError, match="ended early"):
            list(one.read("metadata/timestamp.json"))
        assert not caught.value.is_permanent


def test_an_idle_connection_that_the_server_closed_costs_nothing() -> None:
    def once(head: bytes, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab")
        raise OSError

    with scripted(once) as site, source(site) as one:
        assert [list(one.fetch([WHOLE])) for _ in range(3)] == [[b"ab"]] * 3
        assert len(site.connections) == 3


def test_a_server_that_asks_to_be_left_alone_is() -> None:
    with scripted(answer("503 Service Unavailable", b"", "Retry-After: 7")) as site, source(site) as one:
        with pytest.raises(FetchError, match="503"):
            list(one.read("a"))
        with pytest.raises(FetchError, match=r"left alone for [67] s more"):
            list(one.fetch([WHOLE]))
        assert len(site.asked) == 1


def test_a_slow_loris_is_given_up_when_the_time_is_over_in_its_headers_too() -> None:
    def dripping(head: bytes, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while True:
            connection.sendall(b"X-Drip: 1\r\n" if len(drips) < 90 else b"")
            drips.append(None)
            time.sleep(0.02)

    drips: list[None] = []
    with scripted(dripping) as site, source(site, timeout_s=0.2) as one:
        started = time.monotonic()
        with pytest.raises(FetchError, match=r"not done within 0.2 s") as caught:
            list(one.read("a"))
        assert not caught.value.is_permanent
        assert time.monotonic() - started < 5


def test_bytes_below_the_floor_are_a_slow_retrieval() -> None:
    def slow(head: bytes, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nab")
        connection.recv(1)

    pace = Pace(floor_bytes_s=1e6, floor_window_s=0.1)
    with scripted(slow) as site, source(site, pace=pace) as one, pytest.raises(SlowSource, match="2 bytes"):
        list(one.fetch([WHOLE]))


def test_a_call_is_broken_off_by_whoever_closes_the_source_and_by_who_cancels_it() -> None:
    asked = threading.Event()

    def silent(head: bytes, connection: socket.socket) -> None:
        asked.set()
        connection.recv(1)

    with scripted(silent) as site:
        with source(site) as one, pytest.raises(FetchCancelled):
            list(one.stream([WHOLE], cancelled=asked.is_set))
        asked.clear()
        with source(site) as one:
            closing = threading.Thread(target=lambda: (asked.wait(10), one.close()))
            closing.start()
            with pytest.raises(FetchError, match="broken off"):
                list(one.read("a"))
            closing.join()
            with pytest.raises(FetchError, match="closed"):
                list(one.read("a"))


def test_nobody_at_the_address_is_a_transient_error() -> None:
    with source(Site(url="http://127.0.0.1:9")) as one, pytest.raises(FetchError, match="refused") as caught:
        list(one.read("a"))
    assert not caught.value.is_permanent


def test_a_certificate_that_nobody_vouches_for_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = own_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with scripted(answer("200 OK", b"over TLS"), tls=context) as site:
        with source(site) as one, pytest.raises(FetchError, match="certificate is not to be believed") as caught:
            list(one.read("a"))
        assert not caught.value.is_permanent
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with source(site) as one:
            assert b"".join(one.read("a")) == b"over TLS"


def own_certificate(folder: Path) -> Path:
    """Of 127.0.0.1, signed by itself; key and certificate in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = folder / "both.pem"
    path.write_bytes(private + certificate.public_bytes(Encoding.PEM))
    return path


# --- addresses ---


def test_a_proxy_of_the_environment_is_asked_but_not_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(answer("200 OK", b"by proxy")) as proxy, scripted(answer("200 OK", b"straight")) as site:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        with source(site) as one:
            assert b"".join(one.read("a")) == b"straight"
        with source(Site(url="http://store.example/x")) as one:
            assert b"".join(one.read("a b")) == b"by proxy"
        assert [path for path, _ in proxy.asked] == ["http://store.example:80/x/a%20b"]


@pytest.mark.parametrize("url", ["http://", "http://u:secret@h/", "http://h:99999/", "http://h/?q=1", "ftp://h/"])
def test_an_address_that_is_none_or_holds_a_secret_is_refused_without_repeating_the_secret(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST") as caught:
        Endpoint.parse(url)
    assert "secret" not in str(caught.value)


def test_the_scheme_says_what_kind_of_source_it_is() -> None:
    kinds = {
        "127.0.0.1:5": "GrpcSource",
        "http://h/a": "HttpSource",
        "https://h": "HttpSource",
        "s3://abc/x": "S3Source",
    }
    for address, kind in kinds.items():
        with contextlib.closing(source_of(address, timeout_s=1)) as one:
            assert type(one).__name__ == kind
    with pytest.raises(ConfigError, match=r"ftp:// is not known here; accepted: HOST:PORT"):
        source_of("ftp://h/a", timeout_s=1)
