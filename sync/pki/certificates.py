"""X.509 as Outrider uses it: one root, short leaves on P-256 keys, a revocation list. Owns `cryptography.x509`.

A leaf's common name is who it is, its organizational unit the group of nodes whose hints it hears. Everything is PEM.
P-256, because BoringSSL (gRPC) and every Mosquitto's OpenSSL take it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_public_key,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.errors import IdentityRefused

SKEW: Final = timedelta(hours=1)  # validity begins so long before issuing: clocks differ
OWN_PREFIX: Final = "outrider-"  # names of our own processes, which no node can have
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Use(Enum):
    """What a leaf is good for. A node's is worth nothing to somebody who plays the server."""

    NODE = (ExtendedKeyUsageOID.CLIENT_AUTH,)
    SERVER = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)  # services call brokers, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a certificate says. `serial` is hexadecimal, times are UTC."""

    name: str
    group: str
    serial: str
    begins: datetime
    ends: datetime

    def renew_at(self) -> datetime:
        """At two thirds of its life, which begins an hour before it was issued."""
        issued = min(self.begins + SKEW, self.ends)
        return issued + (self.ends - issued) * 2 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A signing request whose signature was good: who asks, and for which public key (DER)."""

    name: str
    public_key: bytes


def check_name(name: str, what: str = "node") -> str:
    """Raises `IdentityRefused` for what cannot be a node's (or a group's) name."""
    if NAME.fullmatch(name) is None or name.startswith(OWN_PREFIX):
        accepted = f"letters, digits, '.', '_' and '-', at most 63, not beginning with {OWN_PREFIX!r}"
        raise IdentityRefused(name, f"no name for a {what}; accepted: {accepted}")
    return name


def new_key() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def new_request(key: bytes, name: str) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name(name, ""))
    return builder.sign(_key(key), hashes.SHA256()).public_bytes(Encoding.PEM)


def read_request(pem: bytes) -> Request:
    """Raises `IdentityRefused` for what is no request, or one whose sender does not hold the key."""
    try:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        is_sound = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
        if not is_sound or not request.is_signature_valid:
            raise IdentityRefused("request", "not signed by a P-256 key")
        public_key = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return Request(name=_common_name(request.subject), public_key=public_key)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as exc:
        raise IdentityRefused("request", "malformed; accepted: a PKCS #10 request in PEM") from exc


def new_root(key: bytes, name: str, *, now: datetime, life: timedelta) -> bytes:
    signer, subject = _key(key), _name(name, "")
    public = signer.public_key()
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    builder = _leaf(public, now, life).subject_name(subject).issuer_name(subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    return builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """A root with its private key, both PEM."""

    certificate: bytes
    key: bytes

    def issue(
        self,
        public_key: bytes,
        name: str,
        *,
        use: Use,
        now: datetime,
        life: timedelta,
        group: str = "",
        hosts: Sequence[str] = (),
    ) -> bytes:
        """A leaf for a public key (DER). `hosts` are the names and addresses that a server answers to."""
        root, signer = x509.load_pem_x509_certificate(self.certificate), _key(self.key)
        life = min(life, root.not_valid_after_utc - now)
        builder = _leaf(_public(public_key), now, life).subject_name(_name(name, group)).issuer_name(root.subject)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(digital_signature=True), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(use.value), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(_hosts(name, hosts)), critical=False)
        issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        builder = builder.add_extension(issued_by, critical=False)
        return builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)

    def revocations(self, revoked: Iterable[tuple[str, datetime]], *, now: datetime, number: int) -> bytes:
        """A revocation list that is good for as long as the root: what matters is that it is the newest here."""
        root = x509.load_pem_x509_certificate(self.certificate)
        builder = x509.CertificateRevocationListBuilder().issuer_name(root.subject)
        builder = builder.last_update(now).next_update(root.not_valid_after_utc)
        builder = builder.add_extension(x509.CRLNumber(number), critical=False)
        for serial, when in revoked:
            one = x509.RevokedCertificateBuilder().serial_number(int(serial, 16)).revocation_date(when)
            builder = builder.add_revoked_certificate(one.build())
        return builder.sign(_key(self.key), hashes.SHA256()).public_bytes(Encoding.PEM)


@lru_cache(maxsize=1024)  # the same at each call of a connection
def read_certificate(pem: bytes) -> Facts:
    """Of the first certificate in `pem`. Raises `IdentityRefused` where there is none."""
    try:
        found = x509.load_pem_x509_certificate(pem)
        return Facts(
            name=_common_name(found.subject),
            group=_first(found.subject, NameOID.ORGANIZATIONAL_UNIT_NAME),
            serial=f"{found.serial_number:x}",
            begins=found.not_valid_before_utc,
            ends=found.not_valid_after_utc,
        )
    except (ValueError, x509.InvalidVersion) as exc:
        raise IdentityRefused("certificate", "malformed; accepted: X.509 in PEM") from exc


def from_der(der: bytes) -> bytes:
    return x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM)


def public_key_of(key: bytes) -> bytes:
    """DER, of a private key in PEM."""
    return _key(key).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def is_pair(key: bytes, certificate: bytes) -> bool:
    """Whether the (first) certificate belongs to the private key."""
    try:
        public = x509.load_pem_x509_certificate(certificate).public_key()
        return public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) == public_key_of(key)
    except ValueError:
        return False


def is_issued_by(certificate: bytes, roots: bytes) -> bool:
    """Whether one of `roots` has signed the (first) certificate."""
    try:
        leaf = x509.load_pem_x509_certificate(certificate)
        candidates = x509.load_pem_x509_certificates(roots)
    except ValueError:
        return False
    return any(_has_signed(root, leaf) for root in candidates)


def read_revocations(pem: bytes, roots: bytes) -> frozenset[str]:
    """Serials of a list that one of `roots` has signed. Raises `IdentityRefused` for any other."""
    try:
        found = x509.load_pem_x509_crl(pem)
        keys = [root.public_key() for root in x509.load_pem_x509_certificates(roots)]
        if not any(isinstance(key, ec.EllipticCurvePublicKey) and found.is_signature_valid(key) for key in keys):
            raise IdentityRefused("revocation list", "not signed by our CA")
        return frozenset(f"{one.serial_number:x}" for one in found)
    except (ValueError, TypeError) as exc:
        raise IdentityRefused("revocation list", "malformed") from exc


def _has_signed(root: x509.Certificate, leaf: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _leaf(public: ec.EllipticCurvePublicKey, now: datetime, life: timedelta) -> x509.CertificateBuilder:
    now = now.astimezone(UTC)
    builder = x509.CertificateBuilder().public_key(public).serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - SKEW).not_valid_after(now + life)


def _hosts(name: str, hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Without any, the name as a URN: a certificate that names no host must not be taken for one by its common name."""
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return names or [x509.UniformResourceIdentifier(f"urn:outrider:node:{name}")]


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _name(name: str, group: str) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if group:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, group))
    return x509.Name(parts)


def _common_name(name: x509.Name) -> str:
    return _first(name, NameOID.COMMON_NAME)


def _first(name: x509.Name, oid: x509.ObjectIdentifier) -> str:
    found = name.get_attributes_for_oid(oid)
    return str(found[0].value) if found else ""


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise IdentityRefused("private key", "malformed; accepted: a P-256 key in PEM") from exc
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise IdentityRefused("private key", "not on the curve P-256")
    return key


def _public(der: bytes) -> ec.EllipticCurvePublicKey:
    key = load_der_public_key(der)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise IdentityRefused("public key", "not on the curve P-256")
    return key
