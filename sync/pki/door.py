"""Who may call the sync service: everybody on loopback, or whoever shows a certificate of our CA that still counts.

TLS has checked whose certificate it is before a call gets here; this looks again at each call, since connections last.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc

from common.errors import IdentityRefused, OutriderError
from common.loopback import is_loopback
from sync.pki.authority import Authority
from sync.pki.certificates import Facts
from sync.pki.denied import DenyList

logger = logging.getLogger(__name__)
_LOOK_S: Final = 60.0  # how often the server's own certificate is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who calls. `certificate` is PEM."""

    facts: Facts
    certificate: bytes


class Door(Protocol):
    def bind(self, server: Any, address: str) -> int:
        """Listens there; the port. Raises RuntimeError where that cannot be had."""
        ...

    async def admit(self, context: Any) -> Peer | None:
        """Whose call it is; ends a call that is nobody's who may. None where nobody is asked."""
        ...


class OpenDoor:
    """Plain gRPC, for loopback and private networks."""

    def bind(self, server: Any, address: str) -> int:
        return int(server.add_insecure_port(address))

    async def admit(self, context: Any) -> None:
        return None


class CertifiedDoor:
    """Mutual TLS. The server's own certificate is renewed on the way, handshake by handshake."""

    def __init__(self, authority: Authority, name: str, hosts: tuple[str, ...], *, asks_callers: bool = True) -> None:
        """`asks_callers`: no handshake without a certificate of the CA; else only the server shows one."""
        self._authority, self._name, self._hosts, self._asks_callers = authority, name, hosts, asks_callers
        self._deny: DenyList = authority.deny_list()
        self._pem = self._read()

    def bind(self, server: Any, address: str) -> int:
        credentials = grpc.dynamic_ssl_server_credentials(
            self._configuration(self._pem), self._fresh, require_client_authentication=self._asks_callers
        )
        return int(server.add_secure_port(address, credentials))

    async def admit(self, context: Any) -> Peer | None:
        shown = context.auth_context().get("x509_pem_cert") or [b""]
        try:
            return Peer(facts=self._deny.admit(shown[0]), certificate=bytes(shown[0]))
        except IdentityRefused as exc:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(exc))
            raise

    def _fresh(self) -> Any:
        """Called by gRPC's own threads at each handshake; None: what it has is still right."""
        if time.monotonic() - self._looked < _LOOK_S:
            return None
        try:
            pem = self._read()
        except (OutriderError, OSError) as exc:
            logger.error("the service's own certificate cannot be renewed: %s", exc)
            return None
        if pem == self._pem:
            return None
        self._pem = pem
        return self._configuration(pem)

    def _read(self) -> bytes:
        self._looked = time.monotonic()
        return (self._authority.server(self._name, self._hosts) / "identity.pem").read_bytes()

    def _configuration(self, pem: bytes) -> Any:
        return grpc.ssl_server_certificate_configuration([(pem, pem)], root_certificates=self._authority.root)


def check_exposure(host: str, *, is_certified: bool, is_insecure: bool) -> None:
    """Raises ValueError where other machines could call, and nobody meant them to."""
    if not is_certified and not is_insecure and not is_loopback(host):
        raise ValueError(
            f"host is {host!r}, where other machines can call, and there is no TLS; accepted: a loopback address "
            "(127.0.0.1, ::1, localhost), ca (the folder of a CA, `outrider sync ca init`), or insecure (a private "
            "network, a VPN or a proxy keeps strangers out)"
        )
