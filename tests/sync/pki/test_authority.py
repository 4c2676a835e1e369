from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from common.errors import ConfigError, IdentityRefused
from sync.pki.authority import SERVICE, Authority
from sync.pki.certificates import new_key, new_request, read_certificate
from sync.pki.denied import DenyList
from tests.sync.fakes import FakeClock
from tests.sync.pki.devices import enrolled

NOW = datetime(2026, 7, 1, 12, 0, tzinfo=UTC)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@pytest.fixture
def ca(tmp_path: Path, clock: FakeClock) -> Authority:
    return Authority.create(tmp_path / "timed-ca", clock=clock)


def request(name: str) -> bytes:
    return new_request(new_key(), name)


def test_the_keys_of_ca_and_device_are_private_files(authority: Authority, tmp_path: Path) -> None:
    identity = enrolled(authority, tmp_path / "edge-a", "edge-a")
    for path in (authority.folder / "ca.key", identity.folder / "identity.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        load_pem_private_key(path.read_bytes(), None)
    for folder in (authority.folder, identity.folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert b"PRIVATE" not in authority.root + authority.list_file.read_bytes()


def test_a_key_that_others_can_read_is_not_used(authority: Authority, tmp_path: Path) -> None:
    identity = enrolled(authority, tmp_path / "edge-a", "edge-a")
    (authority.folder / "ca.key").chmod(0o640)
    with pytest.raises(ConfigError, match="0600"):
        enrolled(authority, tmp_path / "edge-b", "edge-b")
    (identity.folder / "identity.pem").chmod(0o604)
    with pytest.raises(ConfigError, match="0600"):
        type(identity)(identity.folder).current()


def test_a_ca_is_never_replaced_and_a_creation_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    first = Authority.create(tmp_path)
    with pytest.raises(ConfigError, match="not replaced"):
        Authority.create(tmp_path)
    assert Authority.create(tmp_path, if_absent=True).root == first.root
    key = (tmp_path / "ca.key").read_bytes()
    (tmp_path / "crl.pem").unlink()  # as if the power had gone just before it
    enrolled(Authority.create(tmp_path), tmp_path / "edge-a", "edge-a")
    assert (tmp_path / "ca.key").read_bytes() == key


def test_a_certificate_says_who_and_for_how_long_and_is_no_servers(ca: Authority, clock: FakeClock) -> None:
    pem = ca.enrol(request("edge-a"), ca.new_token("edge-a", group="north"))
    found = x509.load_pem_x509_certificate(pem)
    assert found.subject.rfc4514_string() == "OU=north,CN=edge-a"
    assert found.not_valid_before_utc == NOW - timedelta(hours=1)  # clocks differ
    assert found.not_valid_after_utc == NOW + timedelta(days=7)
    assert list(found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.CLIENT_AUTH
    ]
    found.verify_directly_issued_by(x509.load_pem_x509_certificate(ca.root))
    assert read_certificate(pem).renew_at() == NOW + timedelta(days=7) * 2 / 3


def test_a_token_lets_one_key_in_once_under_one_name_for_its_time(ca: Authority, clock: FakeClock) -> None:
    token, mine = ca.new_token("edge-a", ttl_s=3600), request("edge-a")
    for asked, shown, problem in (
        (request("edge-b"), token, "another name"),
        (mine, token[:-1], "not known"),
        (mine, "", "not known"),
        (b"no request", token, "malformed"),
    ):
        with pytest.raises(IdentityRefused, match=problem) as caught:
            ca.enrol(asked, shown)
        assert token not in str(caught.value)
    ca.enrol(mine, token)
    ca.enrol(mine, token)  # the first answer was lost on its way
    with pytest.raises(IdentityRefused, match="used before"):
        ca.enrol(request("edge-a"), token)
    late = ca.new_token("edge-a", ttl_s=3600)
    clock.advance(seconds=3601)
    with pytest.raises(IdentityRefused, match="has expired"):
        ca.enrol(request("edge-a"), late)


def test_no_token_is_written_down(ca: Authority) -> None:
    token = ca.new_token("edge-a")
    for path in ca.folder.iterdir():
        assert not path.is_file() or token.encode() not in path.read_bytes()


def test_a_request_that_its_key_did_not_sign_is_refused(ca: Authority) -> None:
    whole = x509.load_pem_x509_csr(request("edge-a"))
    from cryptography.hazmat.primitives.serialization import Encoding

    der = bytearray(whole.public_bytes(Encoding.DER))
    der[-1] ^= 1
    forged = ssl.DER_cert_to_PEM_cert(bytes(der)).replace("CERTIFICATE", "CERTIFICATE REQUEST")
    with pytest.raises(IdentityRefused):
        ca.enrol(forged.encode(), ca.new_token("edge-a"))


@pytest.mark.parametrize("name", ["", SERVICE, "outrider-x", "a/b", "#", "+", "a b", "ä", "x" * 64, "-x", "a\nb"])
def test_no_node_has_a_name_of_ours_or_one_that_means_something_in_a_topic(ca: Authority, name: str) -> None:
    with pytest.raises(IdentityRefused):
        ca.new_token(name)
    with pytest.raises(IdentityRefused):
        ca.new_token("edge-a", group=name)


def test_a_node_renews_its_own_certificate_and_no_others(ca: Authority, clock: FakeClock) -> None:
    old = ca.enrol(request("edge-a"), ca.new_token("edge-a", group="north"))
    clock.advance(days=5)
    new = read_certificate(ca.renew(request("edge-a"), old))
    assert (new.name, new.group, new.ends) == ("edge-a", "north", NOW + timedelta(days=12))
    with pytest.raises(IdentityRefused, match="another one's"):
        ca.renew(request("edge-b"), old)
    ca.revoke("edge-a")
    with pytest.raises(IdentityRefused, match="revoked"):
        ca.renew(request("edge-a"), old)


def test_a_service_does_not_renew_as_a_node(ca: Authority) -> None:
    pem = (ca.server(SERVICE, ("localhost",)) / "identity.pem").read_bytes()
    with pytest.raises(IdentityRefused, match="only nodes"):
        ca.renew(request(SERVICE), pem)


def test_revoking_a_node_concerns_all_that_it_has_and_its_open_tokens(ca: Authority, clock: FakeClock) -> None:
    first = ca.enrol(request("edge-a"), ca.new_token("edge-a"))
    second = ca.renew(request("edge-a"), first)
    other = ca.enrol(request("edge-b"), ca.new_token("edge-b"))
    token = ca.new_token("edge-a")
    serials, _ = ca.revoke("edge-a")
    revoked = {one.serial_number for one in x509.load_pem_x509_crl(ca.list_file.read_bytes())}
    assert revoked == {int(serial, 16) for serial in serials}
    assert revoked == {x509.load_pem_x509_certificate(pem).serial_number for pem in (first, second)}
    deny = ca.deny_list()
    assert deny.admit(other).name == "edge-b"
    with pytest.raises(IdentityRefused, match="revoked"):
        deny.admit(second)
    with pytest.raises(IdentityRefused, match="not known"):
        ca.enrol(request("edge-a"), token)
    assert deny.admit(ca.enrol(request("edge-a"), ca.new_token("edge-a"))).name == "edge-a"  # a device that came back


def test_one_serial_can_be_revoked_and_an_unknown_one_is_an_error(ca: Authority) -> None:
    first = ca.enrol(request("edge-a"), ca.new_token("edge-a"))
    second = ca.renew(request("edge-a"), first)
    ca.revoke(f"{x509.load_pem_x509_certificate(first).serial_number:X}")
    assert ca.deny_list().admit(second)
    with pytest.raises(IdentityRefused, match="revoked"):
        ca.deny_list().admit(first)
    with pytest.raises(IdentityRefused, match="nothing"):
        ca.revoke("edge-z")


def test_each_revocation_list_is_later_than_the_last_and_forgets_what_has_expired(
    ca: Authority, clock: FakeClock
) -> None:
    lists = [x509.load_pem_x509_crl(ca.list_file.read_bytes())]
    for name in ("edge-a", "edge-b", "edge-c"):  # within the same second
        ca.enrol(request(name), ca.new_token(name))
        ca.revoke(name)
        lists.append(x509.load_pem_x509_crl(ca.list_file.read_bytes()))
    times = [one.last_update_utc for one in lists]
    assert times == sorted(set(times))
    assert [len(list(one)) for one in lists] == [0, 1, 2, 3]
    clock.advance(days=9)
    ca.enrol(request("edge-d"), ca.new_token("edge-d"))
    ca.revoke("edge-d")
    assert len(list(x509.load_pem_x509_crl(ca.list_file.read_bytes()))) == 1


def test_the_deny_list_refuses_what_has_expired_and_keeps_what_it_knew(ca: Authority, clock: FakeClock) -> None:
    pem = ca.enrol(request("edge-a"), ca.new_token("edge-a"))
    gone = ca.enrol(request("edge-b"), ca.new_token("edge-b"))
    ca.revoke("edge-b")
    deny = ca.deny_list()
    ca.list_file.write_bytes(b"damaged")
    with pytest.raises(ConfigError):
        ca.deny_list()
    assert deny.admit(pem)
    with pytest.raises(IdentityRefused, match="revoked"):
        deny.admit(gone)
    clock.advance(days=7, seconds=1)
    with pytest.raises(IdentityRefused, match="expired"):
        deny.admit(pem)


def test_a_revocation_list_of_another_ca_is_refused(ca: Authority, authority: Authority) -> None:
    with pytest.raises(ConfigError, match="not signed by our CA"):
        DenyList(authority.list_file, ca.root)


def test_a_servers_certificate_is_issued_anew_when_it_is_due_or_its_names_change(
    ca: Authority, clock: FakeClock
) -> None:
    def serial(*hosts: str) -> str:
        return read_certificate((ca.server(SERVICE, hosts) / "identity.pem").read_bytes()).serial

    first = serial("localhost", "10.0.0.1")
    clock.advance(days=19)
    assert serial("localhost", "10.0.0.1") == first
    clock.advance(days=2)  # 21 of 30 days
    second = serial("localhost", "10.0.0.1")
    assert second != first
    third = serial("localhost", "sync.example")
    assert third not in (first, second)
    ca.revoke(SERVICE)  # its key was stolen
    assert serial("localhost", "sync.example") not in (first, second, third)
    found = x509.load_pem_x509_certificate((ca.folder / "servers" / SERVICE / "identity.pem").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "sync.example"]
